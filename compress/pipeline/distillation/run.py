"""Finishing of an existing packed checkpoint, of this toolkit or another, as a resumable run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from calibration.sequences import load_tokenizer
from calibration.statistics import full_float32
from compress.checkpoint.config import COMPRESSION_KEY, compression_block, dtype_name
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.verify import StructureReport, verify_against, verify_structure
from compress.checkpoint.writer import BlockStore
from compress.common.cli import DISTRIBUTION, tool_version
from compress.common.device import resolve_device
from compress.common.errors import CheckpointError, ToolkitError
from compress.common.files import REPORT_FILE, read_json, sync
from compress.evaluate.server import Server, ServerScorer
from compress.pipeline.distillation.finished import (
    FinishedCheckpoint,
    open_model,
    train_checkpoint,
    with_digests,
    writable,
    write_finished,
)
from compress.pipeline.distillation.served_teacher import ServedTeacher
from compress.pipeline.distillation.streamed_model import StreamedModel
from compress.pipeline.distillation.targets import Teacher
from compress.pipeline.distillation.training import Finish
from compress.pipeline.prepare import SourceModel, calibration_sequences, pick_dtype
from compress.pipeline.resume import Progress, only_one_run
from compress.recipe import CalibrationOptions
from compress.reporting.model_card import write_card
from compress.stages.finish import FinishStage


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Request to finish a packed checkpoint.

    Attributes:
        packed: its folder.
        dense: folder of the model that it was made from, or a running server of it.
        source: recorded name of the dense model.
        measure: whether to measure perplexity and KL at the end.
    """

    packed: Path
    dense: Path | Server
    source: str
    stage: FinishStage
    calibration: CalibrationOptions
    seed: int
    out: Path
    device: str = "auto"
    dtype: str = "auto"
    restart: bool = False
    trust_remote_code: bool = False
    command: str = ""
    measure: bool = True


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Result of a run."""

    out: Path
    finish: Finish
    structure: StructureReport
    quality: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as `--json` prints them."""
        values = {"out": str(self.out), "finish": self.finish.to_dict(), "quality": dict(self.quality)}
        return values | {"structure": self.structure.as_dict(), "notes": list(self.notes)}


def finish(request: FinishRequest, quiet: bool = False) -> FinishedRun:
    """Trains a packed checkpoint and writes it to a new folder, continuing an interrupted run of the same
    configuration. Raises ToolkitError."""
    started, packed = time.monotonic(), PackedCheckpoint.open(request.packed)
    if not packed.schemes and not request.stage.rank:
        remedy = "Quantize it first: compress quantize MODEL; or train updates of its matrices: --rank 16"
        raise CheckpointError(f"{packed.path} holds no quantized weights", remedy)
    start = writable(packed)
    device = resolve_device(request.device)
    dtype = pick_dtype(request.dtype, dtype_name(packed.config), device)
    dense = None if isinstance(request.dense, Server) else request.dense
    source = SourceModel(dense or request.packed, device, dtype, request.trust_remote_code)
    tokens = calibration_sequences(request.calibration, source, request.seed).tokens
    identity = {
        "packed": _files(packed.files),
        "dense": _files(PackedCheckpoint.open(dense).files) if dense else str(request.dense),
        "stage": asdict(request.stage),
        "tokens": sha256(tokens.numpy().tobytes()).hexdigest(),
        "seed": request.seed,
        "device": device.type,
        "dtype": str(dtype),
        "tool": tool_version(),
    }
    with only_one_run(request.out), full_float32():
        progress = Progress.open(request.out, identity, request.restart)
        progress.begin()
        model = open_model(request.packed, device, dtype, request.trust_remote_code)
        teacher, model.checkpoint = _teacher(request, model), start
        store = BlockStore(progress.folder / "finish")
        trained, result = train_checkpoint(model, teacher, tokens, request.stage, request.seed, store, quiet)
        trained = replace(trained, config=_recorded(trained, request, result))
        digests = write_finished(trained, progress.finished)
        structure = verify_structure(progress.finished)
        if problems := [*structure.problems, *verify_against(progress.finished, digests)]:
            raise CheckpointError(
                f"the checkpoint just written does not verify: {problems[0]}", "Nothing was put in place. Report it"
            )
        quality = _measure(request, progress.finished)
        values = {"command": request.command, "quality": quality, "seconds": round(time.monotonic() - started, 2)}
        _put_in_place(request, progress.finished, digests, values | {"finish": result.to_dict()})
        progress.discard()
    return FinishedRun(request.out, result, structure, quality, _notes(start))


def _notes(start: FinishedCheckpoint) -> tuple[str, ...]:
    if not start.rounded:
        return ()
    dtype = str(start.dtype).removeprefix("torch.")
    counts = f"{len(start.rounded)} of {len(start.modules)} matrices"
    return (f"scales of {counts} are stored in {dtype}, also before the training: {start.format} is only read",)


def _teacher(request: FinishRequest, model: StreamedModel) -> Teacher:
    """Opens the dense model, on the same device as the one that is trained, or asks a server whether it is there."""
    if not isinstance(request.dense, Server):
        return open_model(request.dense, model.device, model.dtype, request.trust_remote_code)
    scorer = ServerScorer(request.dense, load_tokenizer(request.packed))
    return ServedTeacher(scorer, model.skeleton.model.config.vocab_size)


def _files(files: TensorFiles) -> dict[str, list[int]]:
    found = ((file.path.name, file.path.stat()) for file in files.files)
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found}


def _recorded(packed: PackedCheckpoint, request: FinishRequest, result: Finish) -> dict[str, Any]:
    """Returns config.json with the stage in `compression_config`."""
    before = compression_block(packed.config) or {"source": request.source, "tool": f"{DISTRIBUTION} {tool_version()}"}
    entry = asdict(request.stage) | {"step": result.step, "seed": request.seed}
    return packed.config | {COMPRESSION_KEY: before | {"finish": entry}}


def _measure(request: FinishRequest, folder: Path) -> dict[str, Any]:
    from compress.evaluate.session import quick_check

    if not request.measure:
        return {"not_measured": "not requested"}
    if isinstance(request.dense, Server):
        return {"not_measured": f"the dense model is a server: compress compare-logits {request.dense} {request.out}"}
    try:
        return quick_check(folder, request.dense)
    except ToolkitError as error:
        return {"not_measured": str(error)}


def _put_in_place(request: FinishRequest, folder: Path, digests: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Replaces what the report of the packed checkpoint says about it, if there is one, and renames the folder."""
    path = folder / REPORT_FILE
    if path.is_file():
        report = with_digests(read_json(path), digests) | dict(values)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_card(folder, folder if path.is_file() else request.packed)
    folder.rename(request.out)
    sync(request.out.parent)

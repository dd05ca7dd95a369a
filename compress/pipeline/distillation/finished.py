"""Checkpoints with trained numbers in place of stored ones: training, writing and verification."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.checkpoint.config import dense_config, quantization_block
from compress.checkpoint.formats import format_for
from compress.checkpoint.formats.base import Container, ReadOnly
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, Weight
from compress.checkpoint.weights.base import digest
from compress.checkpoint.writer import BlockStore, write_checkpoint
from compress.common.errors import CheckpointError, SchemeError
from compress.pipeline.distillation.parts import trained_parts, with_parts
from compress.pipeline.distillation.streamed_model import StreamedModel, Trained, with_trained
from compress.pipeline.distillation.targets import Teacher
from compress.pipeline.distillation.training import Finish, Training
from compress.pipeline.prepare import RunContext
from compress.pipeline.resume import Progress, RunDisplay
from compress.pipeline.skeleton import open_skeleton
from compress.stages.finish import FinishStage


@dataclass(frozen=True)
class FinishedCheckpoint(PackedCheckpoint):
    """A checkpoint with trained numbers, which are rounded to the stored dtypes on each read.

    Attributes:
        rounded: modules of a format that is only read (GGUF) whose scales the written one holds in the model's dtype.
        trained: by tensor name.
    """

    holds_weights: ClassVar[bool] = False

    rounded: frozenset[str] = field(default=frozenset(), kw_only=True)
    trained: Mapping[str, list[Trained]] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(cls, packed: PackedCheckpoint, **changes: Any) -> FinishedCheckpoint:
        """Returns a checkpoint of the same files, with `changes` of the attributes above."""
        kept = packed.path, packed.config, packed.files, packed.schemes, packed.codec
        return cls(*kept, inputs=packed.inputs, **changes)

    def packed_weight(self, module: str) -> Weight:
        weight = super().packed_weight(module)
        if module in self.rounded:
            written = {path: each.to(self.dtype) for path, each in trained_parts(weight).items()}
            weight = with_parts(weight, written)
        return with_trained(weight, self.trained.get(f"{module}.weight", ()), Trained.stored)

    def tensor(self, name: str) -> Tensor:
        start, parts = super().tensor(name), self.trained.get(name, ())
        return parts[0].stored(start) if parts and not parts[0].path else start


def open_model(path: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> StreamedModel:
    """Opens a checkpoint for training or prediction. Raises CheckpointError: it cannot be run by blocks."""
    packed = PackedCheckpoint.open(path)
    if packed.reordered or quantization_block(packed.config).get("transform_config"):
        raise CheckpointError(
            f"{path} has columns in another order or online transforms, which are not trained",
            "Quantize it again: compress quantize takes it as its source",
        )
    skeleton = open_skeleton(path, dense_config(packed.config), trust_remote_code)
    return StreamedModel(skeleton, packed, device, dtype)


def train_checkpoint(
    model: StreamedModel,
    teacher: Teacher,
    tokens: Tensor,
    stage: FinishStage,
    seed: int,
    store: BlockStore,
    quiet: bool,
) -> tuple[FinishedCheckpoint, Finish]:
    """Trains a packed checkpoint, continuing from what `store` holds. Raises ToolkitError."""
    with RunDisplay(1, 0, quiet, unit="finish") as display:
        result = Training(model, teacher, tokens, stage, seed, store).run(display)
        display.finish(result.describe())
    start = model.checkpoint
    kept = start.rounded if isinstance(start, FinishedCheckpoint) else frozenset[str]()
    return FinishedCheckpoint.of(start, rounded=kept, trained=model.trained if result.step else {}), result


def written_container(packed: PackedCheckpoint) -> Container:
    """Returns the format in which a checkpoint is written: its own, or one of this toolkit if its own is only read."""
    return format_for(packed.schemes) if isinstance(packed.codec, ReadOnly) else packed.codec


def writable(packed: PackedCheckpoint) -> FinishedCheckpoint:
    """Returns a checkpoint whose weights its written format holds, and still does with trained numbers. Raises
    CheckpointError: that format does not hold a weight."""
    if not isinstance(packed.codec, ReadOnly):
        return FinishedCheckpoint.of(packed)
    integers = frozenset(module for module, scheme in packed.schemes.items() if isinstance(scheme, Int))
    found, codec = FinishedCheckpoint.of(packed, rounded=integers), written_container(packed)
    try:
        for module in packed.modules:
            codec.encode(module, found.packed_weight(module), packed.dtype)
            packed.files.release()
    except SchemeError as error:
        problem = f"{packed.path} is in the format {packed.format}, which is only read, and {error.problem}"
        raise CheckpointError(problem, "Finish a checkpoint that compress quantize wrote") from error
    return found


def write_finished(finished: FinishedCheckpoint, out: Path) -> dict[str, str]:
    """Writes a checkpoint, see `written_container`. Returns the digest of every packed module."""
    codec = written_container(finished)
    shutil.rmtree(out, ignore_errors=True)
    write_checkpoint(finished, codec.name, out)
    digests = {}
    for module in finished.modules:
        digests[module] = digest(finished.packed_weight(module))
        finished.files.release()
    return digests


def with_digests(report: dict[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """Returns a report with the digests of trained weights in place of those before."""

    def changed(block: dict[str, Any]) -> dict[str, Any]:
        return block | {"digests": {name: digests.get(name, before) for name, before in block["digests"].items()}}

    return report | {name: [changed(block) for block in report[name]] for name in ("blocks", "ends") if name in report}


def finish_folder(
    context: RunContext, progress: Progress, folder: Path, quiet: bool
) -> tuple[Path, Finish | None, dict[str, str]]:
    """Trains the assembled checkpoint in `folder` if the recipe has such a stage. Raises ToolkitError.

    Returns:
        The checkpoint, the outcome, and the new digests of its packed modules; without such a stage None and no digest.
    """
    stage, request = context.request.recipe.find(FinishStage), context.request
    if stage is None:
        return folder, None, {}
    paths, how = (folder, request.model), (context.device, context.dtype, request.trust_remote_code)
    model, teacher = (open_model(path, *how) for path in paths)
    store = BlockStore(progress.folder / "finish")
    finished, result = train_checkpoint(model, teacher, context.tokens, stage, request.recipe.seed, store, quiet)
    trained = progress.folder / "trained"
    digests = write_finished(finished, trained)
    shutil.rmtree(folder)
    trained.rename(folder)
    return folder, result, digests

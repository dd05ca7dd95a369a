"""Everything a run needs, opened and checked before any of it starts: what `--dry-run` shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.config import dtype_name, read_config
from compress.checkpoint.disk import check_out_folder
from compress.checkpoint.source import TensorFiles
from compress.compute import pick_device, pick_dtype
from compress.memory import estimate_peak, first_micro_batch
from compress.plan import Plan, by_kind
from compress.planning import make_plan
from compress.recipe import Recipe
from compress.skeleton import Skeleton, open_skeleton


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a user asks for.

    Attributes:
        model: folder of the dense model.
        source: how the result names its source: `demo`, or the absolute path.
        recipe: what to do.
        out: folder to write; must not exist.
        device, dtype: where and in which dtype calibration runs; `auto` decides.
        restart: throw away unfinished progress instead of continuing it.
        trust_remote_code: whether Python files of the model folder may run.
        micro_batch: sequences that run at once; 0 decides.
        measure: whether perplexity and KL are measured at the end, with the whole dense and packed models in memory.
    """

    model: Path
    source: str
    recipe: Recipe
    out: Path
    device: str = "auto"
    dtype: str = "auto"
    restart: bool = False
    trust_remote_code: bool = False
    micro_batch: int = 0
    measure: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with everything resolved.

    Attributes:
        length: tokens of a calibration sequence, within the model's context.
        peak_memory: estimated bytes at the worst moment.
        disk: bytes needed on the disk of the output while the run lasts.
    """

    request: RunRequest
    config: dict[str, Any]
    files: TensorFiles
    skeleton: Skeleton
    plan: Plan
    device: torch.device
    dtype: torch.dtype
    length: int
    micro_batch: int
    peak_memory: int
    disk: int

    @property
    def calibrates(self) -> bool:
        return self.request.recipe.needs_calibration

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: what `--dry-run --json` prints."""
        calibration = self.request.recipe.calibration
        return {
            "model": str(self.request.model),
            "source": self.request.source,
            "out": str(self.request.out),
            "recipe": self.request.recipe.to_dict(),
            "calibration": {"source": calibration.source, "samples": calibration.samples, "length": self.length}
            if self.calibrates
            else None,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "micro_batch": self.micro_batch,
            "peak_memory_bytes": self.peak_memory,
            "disk_bytes": self.disk,
            **self.plan.to_dict(),
        }

    def summary_rows(self) -> list[tuple[str, ...]]:
        """The plan as lines of a table: tensor, shape, count, scheme, megabytes before and after, why dense."""
        return [
            (
                name,
                " x ".join(map(str, shape)),
                str(len(rows)),
                f"{assignment.method} {assignment.scheme}" if assignment else "dense",
                f"{sum(row.bytes_before for row in rows) / 1e6:,.2f}",
                f"{sum(row.bytes_after for row in rows) / 1e6:,.2f}",
                reason,
            )
            for (name, shape, assignment, reason), rows in by_kind(self.plan.rows).items()
        ]


def prepare(request: RunRequest) -> Prepared:
    """Opens and checks everything; reads no weights and writes nothing.

    Raises:
        ToolkitError: whatever would make the run fail and can be known now.
    """
    check_out_folder(request.out)
    device = pick_device(request.device)
    files = TensorFiles.open(request.model)
    config = read_config(request.model)
    skeleton = open_skeleton(request.model, config, request.trust_remote_code)
    model_dtype = _model_dtype(config, files)
    plan = make_plan(skeleton, files, request.recipe, model_dtype)
    dtype = pick_dtype(request.dtype, model_dtype, device)
    calibration = request.recipe.calibration
    length = min(calibration.length, config.get("max_position_embeddings") or calibration.length)
    micro_batch = request.micro_batch or first_micro_batch(length, device.type)
    samples = calibration.samples if request.recipe.needs_calibration else 0
    peak = estimate_peak(skeleton, plan, samples, length, min(micro_batch, max(samples, 1)), dtype.itemsize)
    disk = _disk_bytes(files, plan, samples * length * skeleton.model.config.hidden_size * dtype.itemsize)
    return Prepared(request, config, files, skeleton, plan, device, dtype, length, micro_batch, peak, disk)


def _model_dtype(config: dict[str, Any], files: TensorFiles) -> str:
    """What config.json says; where it says nothing, the dtype of the largest tensor."""
    if config.get("dtype") or config.get("torch_dtype"):
        return dtype_name(config)
    largest = max(files.names(), key=lambda name: math.prod(files.shape(name)))
    return str(files.dtype(largest)).removeprefix("torch.")


def _disk_bytes(files: TensorFiles, plan: Plan, hidden: int) -> int:
    """Pieces and the assembled checkpoint exist side by side at the end; two blocks' inputs do in between."""
    side = sum(file.stat().st_size for file in files.side_files())
    return 2 * plan.bytes_after + side + 2 * hidden

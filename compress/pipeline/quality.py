"""Quality check after compression, and its plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.device import available_bytes, resolve_device
from compress.common.errors import ToolkitError
from compress.models.config import context_length
from compress.models.registry import find_family
from compress.pipeline.prepare import RunContext
from compress.pipeline.resume import Progress, RunDisplay
from compress.plan import PlanRow

if TYPE_CHECKING:
    from compress.evaluate.stream_plan import StreamPlan
    from runtime.backends.base import Target


def check_quality(
    folder: Path, context: RunContext, progress: Progress, digests: Mapping[str, str], quiet: bool
) -> dict[str, Any]:
    """Returns perplexity and KL on a small fixed slice, or the reason why they were not measured.

    Args:
        progress: progress whose folder holds hidden states if both models do not fit in memory.
        digests: digests of the weights in `folder`, see `check_checkpoint`.
    """
    if not context.request.measure:
        return {"not_measured": "not requested"}
    from compress.evaluate.session import quick_check
    from compress.evaluate.streamed import Streaming

    # The checkpoint is assembled again after an interruption, so its files do not identify it.
    weights = sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    streaming = Streaming(progress.folder / "quality", weights=weights, is_private=True)
    with RunDisplay(1, quiet=quiet, unit="quality check") as display:
        said = set[str]()

        def on_progress(what: str, done: int, total: int) -> None:
            display.step(what, done / total)
            if streaming.folder.exists() and what not in said:
                display.say(f"quality check: {what}")
            said.add(what)

        try:
            return quick_check(
                folder,
                context.request.model,
                calibration=context.sequences,
                streaming=streaming,
                on_progress=on_progress,
                say=display.say,
            )
        except ToolkitError as error:
            return {"not_measured": str(error)}


def measure_asked(folder: Path, context: RunContext, quiet: bool) -> dict[str, Any]:
    """Returns the findings of the figures that the request asks for, in the checkpoint in `folder`, by name."""
    if not context.request.figures:
        return {}
    from compress.evaluate.side import measure_figures
    from compress.pipeline.answers import sides

    with RunDisplay(1, quiet=quiet, unit="figures of the gate") as display:
        found = measure_figures(
            context.request.figures,
            *sides(context.request.model, folder, context.request.trust_remote_code),
            lambda what, done, total: display.step(what, done / total),
        )
        display.finish(", ".join(found))
    return {name: finding.to_dict() for name, finding in found.items()}


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Plan of `check_quality`."""

    plan: StreamPlan | None
    whole_bytes: int
    is_streamed: bool

    def describe(self) -> str:
        """Returns the plan in one line."""
        if self.is_streamed and self.plan:
            return f"quality check: {self.plan.describe()}"
        memory = f"about {self.whole_bytes / 1e9:,.2f} GB with both models in memory"
        return f"quality check: {memory}{', which is not free' if self.is_streamed else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as `--dry-run --json` prints them."""
        plan = self.plan.to_dict() if self.plan else None
        return {"is_streamed": self.is_streamed, "whole_bytes": self.whole_bytes, "streamed": plan}


def plan_quality(context: RunContext) -> CheckPlan:
    """Plans the quality check from shapes."""
    from compress.evaluate.session import both_bytes
    from compress.evaluate.stream_plan import ModelCost, StoredTensor, StreamPlan
    from runtime.backends.base import Target
    from runtime.model.loader import resolve_dtype

    device, whole = resolve_device("auto"), both_bytes(context.request.model)
    target = Target(device, resolve_dtype("auto", context.plan.scale_dtype, device))
    describe = find_family(context.config.get("model_type"))
    plan = None
    if describe is not None:
        rows, spec = context.plan.rows, describe(context.config)
        before = [StoredTensor(row.tensor, row.parameters, row.bytes_before, False) for row in rows]
        after = [StoredTensor(row.tensor, row.parameters, row.bytes_after, _is_packed(row)) for row in rows]
        packed, dense = (ModelCost.of(spec, tensors, target.dtype.itemsize) for tensors in (after, before))
        models = (packed, packed, dense) if _has_two_forms(rows, target) else (packed, dense)
        plan = StreamPlan(spec, models, *_sizes(context, len(models)), target)
    return CheckPlan(plan, whole, whole > available_bytes(device))


def _has_two_forms(rows: Sequence[PlanRow], target: Target) -> bool:
    """Whether the packed model is measured with 8-bit activations too."""
    import torch

    from runtime.activations import scheme_refusal

    packed = ((row.layer_plan.scheme, row.shape) for row in rows if row.layer_plan and row.layer_plan.scheme)
    matrices = (matrix for scheme, shape in packed for matrix in scheme.matrices(*shape[-2:]))
    is_rounded = any(scheme and not scheme_refusal(scheme, columns, target) for scheme, _, columns in matrices)
    return target.dtype == torch.bfloat16 and is_rounded


def _sizes(context: RunContext, models: int) -> tuple[int, int, int]:
    """Returns the number of tokens through all models, per forward pass at most, and per window."""
    from compress.evaluate.checks import SeenText, domain_sample
    from compress.evaluate.session import DEFAULT_LENGTH, QUICK_TOKENS
    from runtime.model.scoring import TOKENS_AT_ONCE

    length = min(DEFAULT_LENGTH, context_length(context.config) or DEFAULT_LENGTH)
    windows = max(1, QUICK_TOKENS // length)
    sample = domain_sample(SeenText.of(context.sequences)) if context.sequences else None
    more = 0 if sample is None else sample.tokens.numel()
    return models * windows * length + more, min(windows * length, TOKENS_AT_ONCE), length


def _is_packed(row: PlanRow) -> bool:
    return row.kept is not None or (row.layer_plan is not None and row.layer_plan.scheme is not None)

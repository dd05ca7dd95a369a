"""Packing of the multi-token prediction head: tried on the finished checkpoint, and kept if acceptance stays high."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.methods import base
from compress.pipeline.block import BlockOutcome
from compress.pipeline.embed_and_head import round_matrix
from compress.pipeline.finish import environment
from compress.pipeline.prepare import RunContext, head_of
from compress.pipeline.resume import MTP, Progress, RunDisplay
from compress.plan import LayerPlan
from compress.stages.mtp import MtpStage


@dataclass(frozen=True, slots=True)
class HeadResult:
    """Acceptance rates of the dense and the packed head, and the resulting decision."""

    stage: MtpStage
    modules: tuple[str, ...]
    data: str
    num_tokens: int
    dense: float
    packed: float

    @property
    def is_packed(self) -> bool:
        """Whether the packed head is kept. A head with a dense acceptance rate of 0 cannot be judged, and stays
        dense."""
        return bool(self.modules) and self.dense > 0 and self.packed >= self.stage.min_acceptance * self.dense

    def describe(self) -> str:
        """Returns the decision with its figures in one line."""
        found = f"{self.dense:.1%} of the dense head's drafts accepted, {self.packed:.1%} of the packed one's"
        least = f"{self.stage.min_acceptance:.0%} of the dense head's"
        kept = str(self.stage.scheme) if self.is_packed else f"stays dense (at least {least} required)"
        return f"{kept}: {found} ({self.num_tokens:,} tokens of {self.data})"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for the report."""
        values = asdict(self)
        values["stage"] |= {"scheme": self.stage.scheme.to_dict()}
        return values | {"modules": list(self.modules), "is_packed": self.is_packed}


def pack_head(
    context: RunContext, progress: Progress, folder: Path, assemble: Callable[[], Path], quiet: bool
) -> tuple[Path, HeadResult | None]:
    """Measures the head of the checkpoint in `folder`, rounds it, measures again, and keeps it if acceptance suffices.
    Raises ToolkitError: the text is not usable, or the model fails.

    Args:
        assemble: function that rebuilds the checkpoint from all pieces.

    Returns:
        The checkpoint, and the measurements; None without such a stage.
    """
    stage = context.request.recipe.find(MtpStage)
    if stage is None:
        return folder, None
    from compress.evaluate.kv_cache import measured_windows
    from compress.evaluate.mtp import measure_acceptance

    windows = measured_windows(folder, data=stage.data, tokens=stage.tokens, length=stage.max_seq_length)
    with RunDisplay(1, 0, quiet, unit="multi-token prediction head") as display:
        display.step("measuring the dense head")
        dense = measure_acceptance(folder, windows, str(context.device))
        outcome = _round(context, stage)
        facts = outcome.facts() | {"block": MTP, "environment": environment(context)}
        progress.pieces.write(MTP, outcome.tensors(context.scale_dtype), facts)
        folder = assemble()
        display.step("measuring the packed head", 0.5)
        packed = measure_acceptance(folder, windows, str(context.device))
        count = sum(map(len, windows.tokens))
        result = HeadResult(stage, tuple(outcome.weights), windows.source, count, dense, packed)
        if not result.is_packed:
            progress.pieces.remove(MTP)
            folder = assemble()
        display.finish(result.describe())
    return folder, result


def _round(context: RunContext, stage: MtpStage) -> BlockOutcome:
    """Rounds the linears of the head's block to nearest; fused ones, and those with indivisible groups, stay dense."""
    layer = head_of(context.config, context.files)
    method, outcome = base.fallback("quantize"), BlockOutcome()
    layer_plan = LayerPlan(method, stage.scheme, method.Options())
    routers = {router.name for router in layer.routers()}
    for linear in layer.linears():
        is_stored = f"{linear.name}.weight" in context.files and linear.name not in context.plan.kept
        fits = linear.in_features % (stage.scheme.group_size or linear.in_features) == 0
        if is_stored and fits and linear.name not in routers:
            outcome.keep(*round_matrix(context, linear.name, layer_plan, None))
    context.files.release()
    return outcome

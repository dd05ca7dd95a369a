"""SignRound: the rounding of all weights of a block, learned together from GPTQ's codes on.

Cheng et al. 2023, https://arxiv.org/abs/2309.05516, section 3; `shared.learned_rounding` has the algorithm. The target
is the output of the dense block on the dense model's own inputs, from inputs that come from the packed blocks before,
so a block also compensates the errors of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.coded import INTEGERS
from compress.common.cli import option
from compress.methods.base import (
    BlockObjective,
    Layer,
    MethodOptions,
    Needs,
    QuantizationMethod,
    TunedBlock,
    TuningRecord,
    register,
)
from compress.methods.gptq import compress_gptq

if TYPE_CHECKING:
    from torch import Tensor

    from compress.checkpoint.weights import Weight
    from compress.checkpoint.weights.coded import CodedWeight
    from compress.methods.shared.learned_rounding import Learning

KEPT_START = "gptq: learning did not lower the error of the block"


@dataclass(frozen=True, slots=True)
class SignRoundOptions(MethodOptions):
    """Options of SignRound. The step size falls linearly to zero."""

    steps: int = option(default=200, limits={"at least": 1}, help="Steps of gradient descent for each block.")
    lr: float | None = option(
        default=None,
        limits={"above": 0, "at most": 0.5},
        help="Size of the first step, in steps of the weight's grid. Default: 1 / steps, which just reaches the limit.",
    )
    batch: int = option(default=2, limits={"at least": 1}, help="Calibration sequences in a step.")


@register
class SignRound(QuantizationMethod):
    """Rounding learned by signed gradient descent."""

    name: ClassVar[str] = "signround"
    help: ClassVar[str] = "gptq, then learned rounding: slow, best at 2 and 3 bits"
    Options: ClassVar[type] = SignRoundOptions
    tunes: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False

    def needs(self, options: Any) -> Needs:
        return Needs(inputs=True, hessian=True, learning_batch=options.batch)

    def unsupported(self, scheme: Scheme) -> str:
        if scheme.num_outliers or scheme.hadamard:
            return "it learns no outlier columns and no rotated inputs"
        if scheme.numbers == INTEGERS:
            return ""
        is_other = bool(QuantizationMethod.unsupported(self, scheme))
        return f"it learns integers and their ranges, and {scheme} has none" if is_other else ""

    def compress(self, layer: Layer) -> Weight:
        return compress_gptq(layer)

    def tune_block(
        self,
        objective: BlockObjective,
        starts: Mapping[str, tuple[Tensor, CodedWeight]],
        options: Any,
        tick: Callable[[float], None],
    ) -> TunedBlock:
        from compress.methods.shared.learned_rounding import learn

        weights = {name: _learning(weight, start) for name, (weight, start) in starts.items()}
        before = {name: weight.codes() for name, weight in weights.items()}
        batches = objective.batches()

        def values() -> dict[str, Tensor]:
            return {name: weight.values() for name, weight in weights.items()}

        def gradients(_step: int) -> list[Tensor | None]:
            leaves = {name: value.requires_grad_() for name, value in values().items()}
            sequences = 0
            while sequences < options.batch:
                batch = next(batches)
                sequences += objective.size(batch)
                objective.error(leaves, batch).backward()
            return [leaf.grad for leaf in leaves.values()]

        learned = learn(
            list(weights.values()),
            gradients,
            lambda: objective.judge(values()),
            options.steps,
            1 / options.steps if options.lr is None else options.lr,
            lambda step: tick(step / options.steps),
        )
        after = {name: weight.codes() for name, weight in weights.items()}
        changed = sum(int((after[name].qweight != before[name].qweight).sum()) for name in after)
        total = sum(start.qweight.numel() for start in before.values())
        record = TuningRecord(options.steps, learned.step, learned.loss_before, learned.loss_after, changed / total)
        return TunedBlock(after, record, "" if learned.step else KEPT_START)


def _learning(weight: Tensor, start: CodedWeight) -> Learning:
    from compress.checkpoint.weights.coded import INT
    from compress.methods.shared.learned_blocks import LearnedBlocks
    from compress.methods.shared.learned_rounding import LearnedRounding

    return LearnedRounding(weight, start) if start.scheme.numbers == INT else LearnedBlocks(weight, start)

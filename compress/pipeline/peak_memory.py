"""What a run will need at its worst moment, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.pipeline.memory import ELEMENTS_AT_ONCE

if TYPE_CHECKING:
    from compress.pipeline.skeleton import Skeleton
    from compress.plan import Plan

_PROCESS_BYTES = 700 * 2**20
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class _Block:
    """Sizes of one transformer block: its numbers, those of its largest linear, and what its linears take and give."""

    parameters: int
    largest: int
    inputs: tuple[int, ...]
    outputs: int

    @classmethod
    def first_of(cls, skeleton: Skeleton) -> _Block:
        block = skeleton.blocks[0]
        linears = list(skeleton.linears(block).values())
        return cls(
            sum(parameter.numel() for parameter in block.parameters()),
            max(linear.weight.numel() for linear in linears),
            tuple({linear.in_features for linear in linears}),
            sum(linear.out_features for linear in linears),
        )

    @property
    def square(self) -> int:
        """Numbers of a matrix over the widest input."""
        return max(self.inputs) ** 2


def estimate_peak(skeleton: Skeleton, plan: Plan, samples: int, length: int, micro_batch: int, item_bytes: int) -> int:
    """Bytes a calibrated run needs at its worst moment, host and device together: an estimate, not a bound.

    Args:
        samples, length: size of the calibration; zero samples when there is none.
        item_bytes: bytes per number of the dtype of computation.
    """
    config, block = skeleton.model.config, _Block.first_of(skeleton)
    factors, ends = _factor_bytes(block, plan), _end_bytes(skeleton, plan)
    if not samples:
        return _PROCESS_BYTES + max(6 * _FLOAT32 * block.largest + factors, ends)
    hidden = getattr(config, "hidden_size", 0) * item_bytes
    # In and out of the block; where it is followed, the same of the dense model.
    states = (4 if plan.follows_dense else 2) * samples * length * hidden
    embedding = getattr(config, "vocab_size", 0) * hidden
    weights = block.parameters * (item_bytes + _FLOAT32) + 5 * _FLOAT32 * block.largest
    activations = _activation_bytes(block, plan, micro_batch * length * item_bytes)
    working = weights + _hessian_bytes(block, plan) + activations + factors
    return _PROCESS_BYTES + states + max(embedding, working, ends)


def _factor_bytes(block: _Block, plan: Plan) -> int:
    """Low-rank factors of all of a block's linears, and one decomposition in float64."""
    if not any(each.factoring for each in plan.assignments.values()):
        return 0
    return _FLOAT32 * block.parameters + 2 * _FLOAT32 * (4 * block.largest + 3 * block.square)


def _end_bytes(skeleton: Skeleton, plan: Plan) -> int:
    """Codes and packed codes of the embedding or the head; their numbers are taken a few rows at a time."""
    sizes = [row.parameters for row in plan.packed if not row.tensor.startswith(f"{skeleton.architecture.blocks}.")]
    return 2 * max(sizes) + 8 * _FLOAT32 * min(ELEMENTS_AT_ONCE, max(sizes)) if sizes else 0


def _hessian_bytes(block: _Block, plan: Plan) -> int:
    squares = sum(width**2 for width in block.inputs)
    uses_hessian = any(each.needs_hessian for each in plan.assignments.values())
    hessians = _FLOAT32 * (squares + 4 * block.square) if uses_hessian else 0
    if not plan.uses_gptaq:
        return hessians
    # Differences of all inputs, and a few square matrices in float64.
    return hessians + _FLOAT32 * (squares + 12 * block.square)


def _activation_bytes(block: _Block, plan: Plan, token_bytes: int) -> int:
    """Of the tokens that run at once, one number of each of which takes `token_bytes`."""
    activations = token_bytes * block.outputs
    if not plan.tuning:
        return activations
    # Latent values, offsets and their best state, gradients, and what backward passes need of each rounding; and all
    # that is between the block's inputs and outputs.
    return 4 * activations + 10 * _FLOAT32 * block.parameters

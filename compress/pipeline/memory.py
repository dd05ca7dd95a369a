"""Memory of a run: estimate, micro-batch size, measured peak, and retries with smaller micro-batches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from compress.common.errors import OutOfMemoryError, is_out_of_memory

if TYPE_CHECKING:
    from torch import nn

    from compress.common.workers import Workers
    from compress.pipeline.skeleton import Skeleton
    from compress.plan import Plan


Result = TypeVar("Result")

ELEMENTS_AT_ONCE = 2**24
"""Number of embedding or head weights in float32 at once: their rows are rounded independently."""
# Tokens per micro-batch: enough for large matrix products, few enough to keep activations small.
_TOKENS_CPU, _TOKENS_GPU = 4096, 16384


def first_micro_batch(length: int, device: str) -> int:
    """Returns the initial number of sequences per micro-batch."""
    return max(1, (_TOKENS_GPU if device.startswith("cuda") else _TOKENS_CPU) // length)


def with_smaller_batches(
    work: Callable[[int], Result], micro_batch: int, on_retry: Callable[[int], None] = lambda _: None
) -> Result:
    """Runs `work(micro_batch)`, halving the micro-batch each time memory runs out.

    `work` must have no side effects when it fails. Raises OutOfMemoryError: memory ran out with a single sequence.
    """
    while True:
        try:
            return work(micro_batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if micro_batch == 1:
                reason = (str(error).splitlines() or ["out of memory"])[0]
                raise OutOfMemoryError(
                    f"not enough even for one sequence at a time ({reason})",
                    "Use a smaller --max-seq-length, or a machine with more memory; finished blocks are kept",
                ) from error
        # Tensors of the failed attempt are freed only after its traceback.
        micro_batch //= 2
        _empty_cache()
        on_retry(micro_batch)


def forget_device_peak(workers: Workers) -> None:
    """Resets the peak memory statistics of GPUs."""
    import torch

    for worker in workers.all:
        if worker.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(worker.device)


def device_peak(workers: Workers) -> int | None:
    """Returns the peak bytes of tensors on the fullest GPU since `forget_device_peak`; None without a GPU."""
    import torch

    peaks = (torch.cuda.max_memory_allocated(each.device) for each in workers.all if each.device.type == "cuda")
    return max(peaks, default=None)


def return_freed_memory() -> None:
    """Releases freed heap pages to the system. Otherwise the C library retains some of every block, and deep models
    would appear to need more memory than shallow ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _empty_cache() -> None:
    import gc

    import torch

    gc.collect()
    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_PROCESS_BYTES = 700 * 2**20
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class _Block:
    """Sizes of one transformer block: parameters, those of its largest linear, and inputs and outputs of its linears
    per token (of active experts only, in a mixture)."""

    parameters: int
    largest: int
    inputs: tuple[int, ...]
    outputs: int
    has_experts: bool = False

    @classmethod
    def of(cls, skeleton: Skeleton, block: nn.Module) -> _Block:
        from compress.checkpoint.modeling.experts import mixtures

        linears = skeleton.linears(block)
        found = dict(mixtures(block))
        chosen = {
            f"{mixture}.{index}.{leaf}"
            for mixture, experts in found.items()
            for index in range(experts.num_chosen)
            for leaf in chain.from_iterable(experts.inputs_of(index))
        }
        inside = tuple(f"{mixture}." for mixture in found)
        used = [each for name, each in linears.items() if name in chosen or not name.startswith(inside)]
        return cls(
            sum(parameter.numel() for parameter in block.parameters()),
            max(linear.weight.numel() for linear in linears.values()),
            tuple({linear.in_features for linear in linears.values()}),
            sum(linear.out_features for linear in used),
            bool(found),
        )

    @property
    def square(self) -> int:
        """Number of elements of a square matrix over the widest input."""
        return max(self.inputs) ** 2


class Peak(NamedTuple):
    """Peak bytes in host memory, and on the first device; on a CPU both are in the same memory."""

    host: int
    device: int


def estimate_peak(
    skeleton: Skeleton, plan: Plan, samples: int, length: int, micro_batch: int, item_bytes: int, workers: int = 1
) -> Peak:
    """Estimates the peak bytes of a calibrated run; not an upper bound.

    Args:
        samples, length: size of the calibration; zero samples without calibration.
        item_bytes: bytes per element of the dtype of computation.
        workers: workers that share the memory of the device.
    """
    config = skeleton.model.config
    # The first layers of a mixture may be dense.
    block = max((_Block.of(skeleton, each) for each in skeleton.blocks), key=lambda each: each.parameters)
    factors, ends = _factor_bytes(block, plan), _end_bytes(skeleton, plan)
    if not samples:
        return Peak(_PROCESS_BYTES, max(6 * _FLOAT32 * block.largest * workers + factors, ends))
    hidden = getattr(config, "hidden_size", 0) * item_bytes
    # Inputs and outputs of the block, those of the dense model if needed, and inputs of experts.
    states = ((4 if plan.needs.dense_model else 2) + block.has_experts) * samples * length * hidden
    embedding = getattr(config, "vocab_size", 0) * hidden
    weights = block.parameters * (item_bytes + _FLOAT32) + factors + _smoothing_bytes(skeleton, plan, item_bytes)
    # Each worker has the statistics of a part of the calibration, next to their sum.
    moments, activations = _moment_bytes(block, plan), _activation_bytes(block, plan, micro_batch * length * item_bytes)
    rounding = _factorizing_bytes(block, plan) + 5 * _FLOAT32 * block.largest
    working = weights + moments + workers * (activations + max(moments, rounding))
    return Peak(_PROCESS_BYTES + states, max(embedding, working, ends))


def _smoothing_bytes(skeleton: Skeleton, plan: Plan, item_bytes: int) -> int:
    """Returns the bytes of rounded weights of all linears that are smoothed together, in float32 and in the dtype of
    computation; outside mixtures they are counted elsewhere."""
    most = 0
    for block, used in zip(skeleton.blocks, plan.smoothing_mappings, strict=True):
        linears = skeleton.linears(block)
        for mapping in used:
            if mapping.routers:
                most = max(most, sum(linears[name].weight.numel() for name in mapping.balance_layers))
    return most * (_FLOAT32 + item_bytes)


def _factor_bytes(block: _Block, plan: Plan) -> int:
    """Returns the bytes of low-rank factors of a block's linears, and of one decomposition in float64."""
    if not any(each.factoring for each in plan.layer_plans.values()):
        return 0
    return _FLOAT32 * block.parameters + 2 * _FLOAT32 * (4 * block.largest + 3 * block.square)


def _end_bytes(skeleton: Skeleton, plan: Plan) -> int:
    """Returns the bytes of the codes of embedding or head, packed and unpacked; values are processed in chunks of
    rows."""
    sizes = [row.parameters for row in plan.packed if not row.tensor.startswith(f"{skeleton.architecture.blocks}.")]
    return 2 * max(sizes) + 8 * _FLOAT32 * min(ELEMENTS_AT_ONCE, max(sizes)) if sizes else 0


def _moment_bytes(block: _Block, plan: Plan) -> int:
    """Returns the bytes of the second moments of all inputs, and of their differences from the dense model's."""
    squares = sum(width**2 for width in block.inputs)
    return _FLOAT32 * squares * (plan.needs.hessian + plan.needs.dense_inputs)


def _factorizing_bytes(block: _Block, plan: Plan) -> int:
    """Returns the bytes of square matrices of the widest input while its Hessian is factorized; methods that read
    differences use float64."""
    return _FLOAT32 * block.square * (2 * plan.needs.hessian + 12 * plan.needs.dense_inputs)


def _activation_bytes(block: _Block, plan: Plan, token_bytes: int) -> int:
    """Returns the bytes of activations, at `token_bytes` per channel and token."""
    activations = token_bytes * block.outputs
    if not plan.needs.learning_batch:
        return activations
    # Latent values, offsets and their best state, gradients, tensors saved for backward passes of each rounding, and
    # all intermediate activations of the block.
    return 4 * activations + 10 * _FLOAT32 * block.parameters

"""Memory of a run: how much is taken at once, what it came to, and what to do when it is not there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from compress.checkpoint.errors import ToolkitError

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

ELEMENTS_AT_ONCE = 2**24
"""Weights of the embedding or the head that are float32 at one time: their rows are rounded independently."""
# Tokens that run at once: enough for large matrix products, few enough to keep activations small.
_TOKENS_CPU, _TOKENS_GPU = 4096, 16384


def first_micro_batch(length: int, device: str) -> int:
    """Sequences to run at once before memory has been found short."""
    return max(1, (_TOKENS_GPU if device.startswith("cuda") else _TOKENS_CPU) // length)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def with_smaller_batches(
    work: Callable[[int], Result], micro_batch: int, on_retry: Callable[[int], None] = lambda _: None
) -> Result:
    """Runs `work(micro_batch)`, halving the micro-batch each time memory runs out.

    `work` must leave nothing behind when it fails.

    Raises:
        ToolkitError: memory ran out with a single sequence.
    """
    while True:
        try:
            return work(micro_batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if micro_batch == 1:
                reason = (str(error).splitlines() or ["out of memory"])[0]
                raise ToolkitError(
                    f"not enough memory even for one sequence at a time ({reason})",
                    "Use a smaller --length, or a machine with more memory; finished blocks are kept",
                ) from error
        # The failed attempt's tensors are only free now that its traceback is gone.
        micro_batch //= 2
        _empty_cache()
        on_retry(micro_batch)


def forget_device_peak(device: torch.device) -> None:
    """Begins to measure anew how much memory of a GPU is in use at most."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> int | None:
    """The most bytes of a GPU that tensors held since `forget_device_peak`; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def return_freed_memory() -> None:
    """Hands freed heap pages back to the system. Without it the C library keeps some of every block's, and a deep model
    seems to need more memory than a shallow one."""
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

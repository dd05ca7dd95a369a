"""Poisoned memory: unwritten memory must never be read, not even to be multiplied by zero."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runtime.backends.kv_pages import BlockMemory
from runtime.backends.state_memory import StateMemory


def poison(memory: BlockMemory) -> None:
    """Fills pages and host memory with NaN, and codes with ones."""
    for tensor in (*memory.tensors.values(), *memory.host.values()):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 255)


def poison_states(memory: StateMemory) -> None:
    """Fills all slots of the pool with NaN."""
    for fields in memory.tensors.values():
        for tensor in fields.values():
            tensor[: memory.num_slots].fill_(float("nan"))
    for fields in memory.host.values():
        for tensor in fields.values():
            tensor.fill_(float("nan"))


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Tensors that torch hands out without values hold NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # else cuBLAS refuses to multiply
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

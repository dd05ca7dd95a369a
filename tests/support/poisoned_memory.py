"""What nobody wrote must never be read, not even to be multiplied by zero."""

from __future__ import annotations

from runtime.model.block_memory import BlockMemory


def poison(memory: BlockMemory) -> None:
    """Fills pages and host memory with NaN, and codes with ones."""
    for tensor in (*memory.tensors.values(), *memory.host.values()):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 255)

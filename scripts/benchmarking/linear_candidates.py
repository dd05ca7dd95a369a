"""Configurations of the int4 kernels that are worth measuring on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.backends.triton.kernels.configs import EXPAND, GEMM, SKINNY, KernelConfig


def candidates(tokens: int) -> Iterator[KernelConfig]:
    """Yields configurations worth measuring for a number of tokens."""
    if tokens <= 128:
        for block_n in (64, 128):
            for num_warps in (4, 8):
                for num_stages in (3, 4, 5):
                    for splits in (1, 2, 4, 8, 16):
                        yield KernelConfig(SKINNY, block_n, min(64, max(16, tokens)), num_warps, num_stages, splits)
    if tokens >= 64:
        for block_m in (64, 128, 256):
            for num_stages in (2, 3):
                yield KernelConfig(GEMM, 128, block_m, 8, num_stages)
    if tokens >= 256:
        yield KernelConfig(EXPAND)

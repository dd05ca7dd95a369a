"""Default sizes of steps. Pure; no torch."""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30


class StepSizes(NamedTuple):
    """Maximum tokens of a step, maximum prompt tokens of one sequence in it, and the reason."""

    tokens: int
    chunk: int
    reason: str


def default_step_sizes(gpu_bytes: int | None = None) -> StepSizes:
    """Returns the sizes for a device.

    A GPU multiplies packed weights by few tokens as fast as it reads them, and by thousands as fast as it computes; the
    activations of a step take a part of its memory that grows with them. A CPU is bound by arithmetic from about ten
    tokens on, where longer steps only let other requests wait.

    Args:
        gpu_bytes: memory of the GPU; None on a CPU.
    """
    if gpu_bytes is None:
        return StepSizes(512, 256, "the default on a CPU, which longer steps make no faster")
    by_memory = ((60, 8192, 2048), (30, 4096, 1024), (15, 2048, 512))
    fitting = (sizes for least, *sizes in by_memory if gpu_bytes >= least * GIB)
    tokens, chunk = next(fitting, (1024, 256))
    size = f"the default for {gpu_bytes / GIB:.0f} GiB"
    return StepSizes(tokens, chunk, f"{size}: products of that many tokens are bound by arithmetic, not by memory")

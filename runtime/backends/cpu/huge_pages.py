"""Memory for weights in pages of 2 MB where the system has them: reading 4 KB pages in order waits for translations of
addresses."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def empty_words(count: int) -> Tensor:
    """Allocates int32 `[count]`, from 2 MB on in huge pages."""
    if ADVICE is None or 4 * count < HUGE_PAGE:
        return torch.empty(count, dtype=torch.int32)
    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them; the memory is there all the same
        memory.madvise(ADVICE)
    return torch.frombuffer(memory, dtype=torch.int32)

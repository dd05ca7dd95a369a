"""Rounding to blocks of 32 values with one float16 scale, and their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding.search import Groups, search_scales, uniform
from compress.checkpoint.gguf.types.base import BlockParts
from compress.checkpoint.gguf.types.legacy import join
from compress.checkpoint.scale_search import divided


def round_symmetric(values: Tensor, bits: int) -> Tensor:
    """Rounds float32 `[N, 32]` to blocks of q4_0, q5_0 or q8_0."""
    middle = 1 << (bits - 1)
    nearest = uniform(-middle, middle - 1)
    scales = search_scales(Groups(values), nearest, (-middle, middle - 1))
    return join(BlockParts((nearest(divided(values, scales)) + middle).to(torch.uint8), scales), bits)

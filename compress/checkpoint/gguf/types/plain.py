"""Types without blocks: floating-point numbers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import BLOCK_TYPES, BlockType

DTYPES = {"f32": torch.float32, "f16": torch.float16, "f64": torch.float64, "bf16": torch.bfloat16}
"""Dtypes of these types, by name."""


def _values(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.contiguous().view(dtype).to(torch.float32)


for name, code in (("f32", 0), ("f16", 1), ("f64", 28), ("bf16", 30)):
    dtype = DTYPES[name]
    BLOCK_TYPES.register()(BlockType(name, code, 1, dtype.itemsize, partial(_values, dtype=dtype)))

"""Types without blocks: floating-point numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import BlockType


def _bfloat16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).to(torch.float32)


def _float16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float16).to(torch.float32)


def _float32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _float64(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float64).to(torch.float32)


TYPES = (
    BlockType("f32", 0, 1, 4, _float32),
    BlockType("f16", 1, 1, 2, _float16),
    BlockType("f64", 28, 1, 8, _float64),
    BlockType("bf16", 30, 1, 2, _bfloat16),
)
DTYPES = {"f32": torch.float32, "f16": torch.float16, "f64": torch.float64, "bf16": torch.bfloat16}
"""Dtypes of these types, by name."""

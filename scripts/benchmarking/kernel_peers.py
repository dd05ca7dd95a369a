"""Packed products of others, to be measured beside ours: those in PyTorch, and gemlite where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

TINYGEMM, SPARSE, GEMLITE = "torch int4", "torch 2:4", "gemlite int4"


def tinygemm(rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`torch.ops.aten._weight_int4pack_mm` in groups of 128."""
    pairs = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scales = torch.rand(columns // 128, rows, 2, device=device, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scales)


def semi_structured(rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """PyTorch's product with 16-bit weights of which every second is zero."""
    from runtime.backends.torch.semi_structured import SemiStructuredLinear

    weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).view(rows, -1, 4)
    weight[..., 2:] = 0
    return SemiStructuredLinear(weight.view(rows, columns), None)


def gemlite(rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The Triton kernels of gemlite, as a peer: 4 bits in groups of 128."""
    from gemlite.core import DType, GemLiteLinear

    linear = GemLiteLinear(4, 128, columns, rows, DType.BF16.value, DType.BF16.value)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    groups = rows * columns // 128
    scales, zeros = (torch.rand(groups, 1, device=device, dtype=torch.bfloat16) for _ in range(2))
    linear.pack(codes, scales, zeros, None)
    return linear


PEERS = {TINYGEMM: tinygemm, SPARSE: semi_structured, GEMLITE: gemlite}


def peers() -> list[str]:
    """Peers that are installed."""
    return [name for name in PEERS if name != GEMLITE or find_spec("gemlite")]

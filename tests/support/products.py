"""Inputs, exact results and errors of tests that multiply by packed weights on a GPU."""

import torch
from torch import Tensor

from compress.checkpoint.scale_search import quantize_tokens
from compress.checkpoint.weights.base import Weight

BOUND = {torch.bfloat16: 6e-3, torch.float16: 1e-3 if torch.cuda.is_available() else 6e-4}
"""Tolerance of the output's rounding. The interpreter truncates bfloat16 where a GPU rounds to the nearest; the tensor
cores of a GPU truncate sums, which for float16 are those of codes with an offset of 1024."""


def activations(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def exact_product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x W^T + bias` in float64, of tokens that are rounded where the scheme says so."""
    scale: Tensor | float = 1.0
    if weight.scheme.activation_bits:
        x, scale = quantize_tokens(x, weight.scheme.activations)
    exact = x.double() @ weight.dequantize(torch.float64).to(x.device).T * scale
    return exact if bias is None else exact + bias.double()

"""Dynamic 8-bit activations: one symmetric scale per token, chosen from the token itself (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.division import divide
from compress.checkpoint.fp8 import FP8, MAX_FP8

MAX_LEVEL = 127


def quantize_tokens(x: Tensor, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Levels `[M, I]`, whole numbers from -127 to 127, and scales `[M, 1]`, with `x ~ levels * scale`.

    Both are float32 (float64 for float64 input). A token's result never depends on its neighbours in the batch.
    A row of zeros gets scale 0 and levels 0; a row that is not finite keeps a scale that is not finite.

    Args:
        fp8: levels are 8-bit floats (e4m3) from -448 to 448 instead, each the nearest one.
    """
    exact = x.double() if x.dtype == torch.float64 else x.float()
    scale = divide(exact.abs().amax(-1, keepdim=True), MAX_FP8 if fp8 else MAX_LEVEL)
    levels = exact / scale.clamp_min(torch.finfo(exact.dtype).tiny)
    return (levels.to(FP8).to(exact.dtype) if fp8 else levels.round_()), scale


def round_tokens(x: Tensor, fp8: bool = False) -> Tensor:
    """`x [M, I]` as a product with 8-bit activations sees it, in its own dtype."""
    levels, scale = quantize_tokens(x, fp8)
    return (levels * scale).to(x.dtype)

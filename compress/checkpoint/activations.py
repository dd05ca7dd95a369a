"""Dynamic rounding of activations to 8 bits, one scale per token."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Activations
from compress.common.device import divide

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
"""The largest number; there is no infinity."""
MAX_LEVEL = 127


def quantize_tokens(x: Tensor, kind: Activations = Activations.INT8) -> tuple[Tensor, Tensor]:
    """Quantized activations q8 `[M, I]` and scales `[M, 1]`, with `x ~ q8 * scale`.

    Both are float32 (float64 for float64 input), q8 with integral values from -127 to 127, or those of e4m3 from
    -448 to 448. A token's result never depends on its neighbours in the batch. A row of zeros gets scale 0 and zeros; a
    row that is not finite keeps a scale that is not finite.
    """
    exact = x.double() if x.dtype == torch.float64 else x.float()
    fp8 = kind is Activations.FP8
    scale = divide(exact.abs().amax(-1, keepdim=True), MAX_FP8 if fp8 else MAX_LEVEL)
    q8 = exact / scale.clamp_min(torch.finfo(exact.dtype).tiny)
    return (q8.to(FP8).to(exact.dtype) if fp8 else q8.round_()), scale


def round_tokens(x: Tensor, kind: Activations = Activations.INT8) -> Tensor:
    """`x [M, I]` as a product with 8-bit activations sees it, in its own dtype."""
    q8, scale = quantize_tokens(x, kind)
    return (q8 * scale).to(x.dtype)

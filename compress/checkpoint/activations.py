"""Dynamic 8-bit activations: one symmetric scale per token, chosen from the token itself (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LEVEL = 127


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levels `[M, I]`, whole numbers from -127 to 127, and scales `[M, 1]`, with `x ~ levels * scale`.

    Both are float32 (float64 for float64 input). A token's result never depends on its neighbours in the batch.
    A row of zeros gets scale 0 and levels 0; a row that is not finite keeps a scale that is not finite.
    """
    exact = x.double() if x.dtype == torch.float64 else x.float()
    scale = exact.abs().amax(-1, keepdim=True) / MAX_LEVEL
    levels = (exact / scale.clamp_min(torch.finfo(exact.dtype).tiny)).round_()
    return levels, scale

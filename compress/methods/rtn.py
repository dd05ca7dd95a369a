"""Round to nearest: every weight to its nearest code, under scales chosen for the least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.scales import encode, search_scales
from compress.checkpoint.scheme import Scheme


def quantize_rtn(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> IntegerWeight:
    """Quantizes `weight [O, I]` without calibration, or with `importance [I]` = diag(H) when there is some.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or importance.
    """
    return encode(weight, search_scales(weight, scheme, importance, scale_dtype), scheme)

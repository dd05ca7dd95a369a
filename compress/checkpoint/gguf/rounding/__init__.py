"""Rounding of values to blocks of GGUF's types, by a search with the least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding.legacy import round_symmetric
from compress.checkpoint.gguf.types.base import BLOCK_TYPES
from compress.checkpoint.gguf.types.plain import DTYPES
from compress.checkpoint.scheme import FORMS
from compress.checkpoint.weights.layouts import Blocks
from compress.common.errors import NumericsError

BITS = {"q4_0": 4, "q5_0": 5, "q8_0": 8}
"""Widths of the integers of types that are not weight forms."""
VALUES_AT_ONCE = 2**21


def round_to(values: Tensor, name: str) -> Tensor:
    """Rounds a matrix `[R, C]`, of which rows are whole blocks, or casts it for a type without blocks.

    Returns:
        uint8 `[R, bytes of a row]`.

    Raises:
        NumericsError: NaN or infinity.
    """
    if dtype := DTYPES.get(name):
        cast = values.to(dtype)
        _check_finite(cast, name)
        return cast.contiguous().view(torch.uint8)
    if isinstance(form := FORMS[name].target() if name in FORMS else None, Blocks):
        _check_finite(values, name)
        return form.blocks(form.round(values))
    kind, flat = BLOCK_TYPES[name], values.reshape(-1, BLOCK_TYPES[name].size)
    blocks = torch.empty(len(flat), kind.nbytes, dtype=torch.uint8)
    step = VALUES_AT_ONCE // kind.size
    for out, part in zip(blocks.split(step), flat.split(step), strict=True):
        wide = part.to(torch.float32)
        _check_finite(wide, name)
        out.copy_(round_symmetric(wide, BITS[name]))
    return blocks.view(len(values), -1)


def _check_finite(values: Tensor, name: str) -> None:
    if not bool(values.isfinite().all()):
        raise NumericsError(f"a weight holds NaN or infinity, which {name} cannot store", "Check the checkpoint")

"""Rounding of values to blocks of GGUF's types, by a search with the least squared error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding import k, legacy
from compress.checkpoint.gguf.types import BY_NAME
from compress.checkpoint.gguf.types.k import LAYOUTS
from compress.checkpoint.gguf.types.plain import DTYPES
from compress.common.errors import NumericsError

ROUNDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": partial(legacy.round_symmetric, bits=4),
    "q5_0": partial(legacy.round_symmetric, bits=5),
    "q8_0": partial(legacy.round_symmetric, bits=8),
    "q4_1": partial(legacy.round_minima, bits=4),
    "q5_1": partial(legacy.round_minima, bits=5),
    **{name: partial(k.round_k, name=name) for name in LAYOUTS},
    "iq4_nl": legacy.round_nonlinear,
}
"""Functions from float32 `[N, size]` to blocks uint8 `[N, nbytes]`, by type."""
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
    kind, flat = BY_NAME[name], values.reshape(-1, BY_NAME[name].size)
    blocks = torch.empty(len(flat), kind.nbytes, dtype=torch.uint8)
    step = VALUES_AT_ONCE // kind.size
    for out, part in zip(blocks.split(step), flat.split(step), strict=True):
        wide = part.to(torch.float32)
        _check_finite(wide, name)
        out.copy_(ROUNDERS[name](wide))
    return blocks.view(len(values), -1)


def _check_finite(values: Tensor, name: str) -> None:
    if not bool(values.isfinite().all()):
        raise NumericsError(f"a weight holds NaN or infinity, which {name} cannot store", "Check the checkpoint")

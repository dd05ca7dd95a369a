"""The compiled search for ranges of groups of weights, and rounding to codes; `c/rounding/ranges.h` defines both."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.cpu.binding import BEST, run_job, struct_fields

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of stored scales, as `ranges.h` numbers them."""


@dataclass(frozen=True, slots=True)
class RangeTrials:
    """Ranges to try.

    Attributes:
        parts: share of the negative and of the positive side of a group's range; symmetric: twice that of the largest
            element, negative for a scale of the other sign.
        neighbours: factor of the best scale, and difference of the best zero point; none around a single part.
        max_code: largest code.
        symmetric: whether all zero points are the midpoint of the codes.
    """

    parts: Sequence[tuple[float, float]]
    neighbours: Sequence[tuple[float, float]]
    max_code: int
    symmetric: bool


MOST_KEPT = 16
"""Ranges of a group that one search returns, at most."""
_MOST_TRIALS = 64
_Trials = c_float * _MOST_TRIALS


class _Search(ctypes.Structure):
    """`RangeSearch` of ranges.h."""

    _fields_ = struct_fields(
        "int64 rows columns group",
        "pointer weight importance",
        "int64 symmetric scale_dtype",
        "float midpoint max_code",
        "int64 parts neighbours",
        ("below", _Trials),
        ("above", _Trials),
        ("factor", _Trials),
        ("shift", _Trials),
        "int64 kept",
        "pointer scales zeros",
    )


class _Encoding(ctypes.Structure):
    """`GroupEncoding` of ranges.h."""

    _fields_ = struct_fields(
        "int64 rows columns group",
        "pointer weight scales zeros",
        "float max_code",
        "pointer codes values",
    )


def search_ranges(
    weight: Tensor,
    importance: Tensor,
    groups: int,
    trials: RangeTrials,
    scale_dtype: torch.dtype,
    instruction_set: int = BEST,
    kept: int = 1,
) -> tuple[Tensor, Tensor]:
    """Returns the scales in `scale_dtype` and zero points, uint8, of least weighted error: both `[K, O, G]`. Raises
    ValueError: the library is not built, an instruction set that this machine lacks, or too many trials.

    Args:
        weight: float32 `[O, I]` on the CPU, contiguous, finite.
        importance: float32 `[I]`, contiguous.
        groups: of each row.
        kept: `K`, ranges of each group, the best first; at most `MOST_KEPT`.
    """
    rows, columns = weight.shape
    midpoint = (trials.max_code + 1) // 2
    scales, zeros = torch.empty(rows, groups, kept), torch.empty(rows, groups, kept, dtype=torch.uint8)
    unit = -midpoint if trials.symmetric else 1
    below, above = zip(*((below / unit, above / unit) for below, above in trials.parts), strict=True)
    search = _Search(
        *(rows, columns, columns // groups, weight.data_ptr(), importance.data_ptr()),
        *(trials.symmetric, SCALE_DTYPES.index(scale_dtype), midpoint, trials.max_code),
        *(len(trials.parts), len(trials.neighbours)),
        *map(_repeat_last, (below, above, *(zip(*trials.neighbours, strict=True) if trials.neighbours else ((), ())))),
        *(kept, scales.data_ptr(), zeros.data_ptr()),
    )
    run_job("ranges_search", search, instruction_set)
    return scales.to(scale_dtype).permute(2, 0, 1), zeros.permute(2, 0, 1)


def encode_groups(weight: Tensor, scales: Tensor, zeros: Tensor, max_code: int, instruction_set: int = BEST) -> Tensor:
    """Returns the nearest codes of `weight`, uint8 `[O, I]`, half to even. Raises ValueError: the library is not built,
    or this machine lacks the instruction set.

    Args:
        weight: float32 `[O, I]` on the CPU, contiguous.
        scales: float32 `[O, G]`, contiguous.
        zeros: uint8 `[O, G]`, contiguous.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    _encode(weight, scales, zeros, max_code, codes.data_ptr(), None, instruction_set)
    return codes


def round_groups(weight: Tensor, scales: Tensor, zeros: Tensor, max_code: int, instruction_set: int = BEST) -> Tensor:
    """Returns the values of the nearest codes of `weight`, float32 `[O, I]`; arguments as those of `encode_groups`."""
    values = torch.empty(weight.shape)
    _encode(weight, scales, zeros, max_code, None, values.data_ptr(), instruction_set)
    return values


def _encode(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    max_code: int,
    codes: int | None,
    values: int | None,
    instruction_set: int,
) -> None:
    rows, columns = weight.shape
    encoding = _Encoding(
        *(rows, columns, columns // scales.shape[1], weight.data_ptr()),
        *(scales.data_ptr(), zeros.data_ptr(), max_code, codes, values),
    )
    run_job("groups_encode", encoding, instruction_set)


def _repeat_last(numbers: Sequence[float]) -> ctypes.Array[c_float]:
    """Returns numbers of trials, then the last one: a trial that comes again is never better. Raises ValueError:
    too many."""
    room = _MOST_TRIALS - len(numbers)
    if room < 0:
        raise ValueError(f"{len(numbers)} trials are more than {_MOST_TRIALS}")
    return _Trials(*numbers, *[each for each in numbers[-1:] for _ in range(room)])

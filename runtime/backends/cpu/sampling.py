"""Rows of scores in compiled code (`sampling.h`): the tokens of torch, in one pass and without noise in memory."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from compress.cpu.binding import BEST, absence, library
from runtime.backends.base import UNDECIDED
from runtime.core.batch import SamplingTensors


class _PeakRows(ctypes.Structure):
    """`PeakRows` of sampling.h."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "vocab")),
        *((name, c_void_p) for name in ("scores", "highest", "finite")),
    )


class _NoisyRows(ctypes.Structure):
    """`NoisyRows` of sampling.h."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "vocab")),
        *((name, c_void_p) for name in ("scores", "seeds", "positions", "winners")),
    )


def argmax(scores: Tensor, instruction_set: int = BEST) -> tuple[Tensor, Tensor]:
    """The first of the highest scores of every row, int64 `[R]`, and whether all of the row are finite, bool `[R]`."""
    scores = scores.contiguous()
    highest, finite = scores.new_empty(len(scores), dtype=torch.int64), scores.new_empty(len(scores), dtype=torch.bool)
    job = _PeakRows(*scores.shape, scores.data_ptr(), highest.data_ptr(), finite.data_ptr())
    _run("argmax_rows", job, instruction_set)
    return highest, finite


def gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, instruction_set: int = BEST) -> Tensor:
    """The token with the highest sum of score and `gumbel_noise` of every row, int64 `[R]`; -1 where two sums are so
    close that the rounding of logarithms decides.

    Args:
        scores: float32 `[R, V]`, finite, or minus infinity where a token cannot be drawn.
        seeds, positions: int64 `[R]`.
    """
    scores, seeds, positions = scores.contiguous(), seeds.contiguous(), positions.contiguous()
    winners = torch.empty_like(seeds)
    where = scores.data_ptr(), seeds.data_ptr(), positions.data_ptr(), winners.data_ptr()
    _run("gumbel_argmax_rows", _NoisyRows(*scores.shape, *where), instruction_set)
    return winners


class CpuSampling:
    """Argmax of contiguous float32 scores on CPUs."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str:
        if device.type != "cpu" or dtype != torch.float32:
            return "reads float32 scores on CPUs"
        return "" if library() is not None else absence()

    def argmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return argmax(scores)

    def gumbel_argmax(self, scores: Tensor, tensors: SamplingTensors) -> Tensor:
        winners = gumbel_argmax(scores, tensors.seeds, tensors.positions)
        return winners.masked_fill_(winners < 0, UNDECIDED)


def _run(name: str, job: ctypes.Structure, instruction_set: int) -> None:
    native = library()
    if native is None:
        raise ValueError("there is no compiled library")
    function = getattr(native, name)
    function.argtypes, function.restype = (c_void_p, c_int), c_int
    if function(ctypes.addressof(job), instruction_set):
        raise ValueError(f"this machine lacks instruction set {instruction_set}")

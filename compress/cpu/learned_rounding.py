"""The compiled values and steps of learned rounding; `c/rounding/learned.h` defines both."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from compress.cpu.binding import BEST, run_job, struct_fields


class _Weight(ctypes.Structure):
    """`LearnedRounding` of learned.h."""

    _fields_ = struct_fields(
        "int64 rows columns group",
        "pointer latent offset scales zeros",
        "float max_code",
        "pointer values gradient",
        "float rate limit",
        "pointer stretched shifted",
    )


def learned_values(
    latent: Tensor, offset: Tensor, scales: Tensor, zeros: Tensor, max_code: int, instruction_set: int = BEST
) -> Tensor:
    """Returns the values of codes that offsets move, float32 `[O, I]`. Raises ValueError: the library is not built, or
    this machine lacks the instruction set.

    Args:
        latent: float32 `[O, I]` on the CPU, contiguous, as `offset` is.
        scales: float32 `[O, G]`, as `zeros` are, which hold whole numbers.
    """
    values, scales, zeros = torch.empty_like(latent), scales.contiguous(), zeros.contiguous()
    weight = _weight(latent, offset, scales, zeros, max_code)
    weight.values = values.data_ptr()
    run_job("learned_values", weight, instruction_set)
    return values


def learned_step(
    latent: Tensor,
    offset: Tensor,
    scales: Tensor,
    zeros: Tensor,
    max_code: int,
    gradient: Tensor,
    rate: float,
    limit: float,
    instruction_set: int = BEST,
) -> tuple[Tensor, Tensor]:
    """Moves offsets in place by `rate` against the sign of their gradient, to `limit` in magnitude at most. Raises
    ValueError: the library is not built, or an instruction set that this machine lacks.

    Args:
        gradient: float32 `[O, I]`, of the loss with respect to the values. `learned_values` describes the others.

    Returns:
        The gradients with respect to scales and zero points `[O, G]`, before the move.
    """
    scales, zeros, gradient = scales.contiguous(), zeros.contiguous(), gradient.contiguous()
    stretched, shifted = torch.empty_like(scales), torch.empty_like(scales)
    weight = _weight(latent, offset, scales, zeros, max_code)
    weight.gradient, weight.rate, weight.limit = gradient.data_ptr(), rate, limit
    weight.stretched, weight.shifted = stretched.data_ptr(), shifted.data_ptr()
    run_job("learned_step", weight, instruction_set)
    return stretched, shifted


def _weight(latent: Tensor, offset: Tensor, scales: Tensor, zeros: Tensor, max_code: int) -> _Weight:
    """Describes a weight to the library. The caller keeps the tensors alive."""
    rows, columns = latent.shape
    pointers = (tensor.data_ptr() for tensor in (latent, offset, scales, zeros))
    return _Weight(rows, columns, columns // scales.shape[1], *pointers, max_code)

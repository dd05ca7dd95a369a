"""Scales and zero points of integer groups, and the codes they give.

The search minimises `sum_i importance_i * (w_i - q_i)^2` of each group. With importance = diag(H), the mean square of
each input, this is the layer's output error when inputs are taken as uncorrelated; without importance it is plain MSE.
Every candidate is rounded to the dtype it will be stored in before it is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.numerics import require_finite
from compress.checkpoint.ranges import GroupRange, round_to_grid, storable
from compress.checkpoint.scheme import Scheme

# Maps the change of a block of groups `[R, G, g]`, which it may overwrite, to its error `[R, G, 1]`.
Measure = Callable[[Tensor], Tensor]

# A chunk of rows and its scratch copies stay in the processor's cache; a GPU wants more work per launch.
_CHUNK_ELEMENTS_CPU = 1 << 19
_CHUNK_ELEMENTS_GPU = 1 << 24


@dataclass(frozen=True, slots=True)
class GroupScales:
    """`scale [O, G]` in the stored dtype (may be negative, never zero) and `zero [O, G]` uint8."""

    scale: Tensor
    zero: Tensor


def search_scales(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
    *,
    inputs: Tensor | None = None,
) -> GroupScales:
    """The scales and zero points with the least weighted squared error.

    Symmetric scales use the signed full range: the group's largest element may land on the code `-2^(bits-1)`, which
    has no positive counterpart, by giving the scale its sign. Asymmetric ranges contain 0, so 0 is stored exactly.

    Args:
        weight: `[O, I]`, any float dtype.
        scheme: bits, group size, symmetry.
        importance: `[I]`, not negative; the mean square of each input. None weighs all columns alike.
        scale_dtype: dtype in which scales are stored.
        inputs: `[T, I]` sample inputs in place of importance: the error is then that of each group's share of the
            outputs, correlations within the group included.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight, importance or inputs.
    """
    groups = scheme.num_groups(weight.shape[1])
    require_finite(weight, "the weight")
    if inputs is None:
        measure = _weighted_error(_column_weights(weight, importance).view(groups, -1))
    else:
        measure = _output_error(inputs.to(weight.device), groups)
    found = [_search_rows(rows, measure, scheme, scale_dtype) for rows in _row_chunks(weight, groups)]
    return GroupScales(torch.cat([each.scale for each in found]), torch.cat([each.zero for each in found]))


def range_scales(weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.bfloat16) -> GroupScales:
    """The scales that span each group's whole range, without a search."""
    require_finite(weight, "the weight")
    rows = weight.float().unflatten(1, (scheme.num_groups(weight.shape[1]), -1))
    scale, zero = GroupRange.of(rows, scheme).full()
    return _stored(storable(scale, scale_dtype), zero, scale_dtype)


def round_in_range(weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`weight [O, I]` as float32, rounded under its `range_scales`: what a search over something else tries often."""
    rounded = torch.empty(weight.shape, device=weight.device)
    groups = scheme.num_groups(weight.shape[1])
    # The chunks of `rounded` are views: what is written to them lands there.
    for rows, out in zip(_row_chunks(weight, groups), _row_chunks(rounded, groups), strict=True):
        scale, zero = GroupRange.of(rows, scheme).full()
        round_to_grid(rows, storable(scale, scale_dtype), zero, scheme, out)
    return rounded


def encode(weight: Tensor, scales: GroupScales, scheme: Scheme) -> IntegerWeight:
    """Rounds `weight [O, I]` to the nearest codes under given scales (half to even)."""
    grouped = weight.float().unflatten(1, (scales.scale.shape[1], -1))
    codes = (grouped / scales.scale.float().unsqueeze(-1)).round_().add_(scales.zero.unsqueeze(-1))
    codes = codes.clamp_(0, scheme.max_code).to(torch.uint8).flatten(1)
    return IntegerWeight(codes, scales.scale, scales.zero, scheme)


def _column_weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    if importance is None:
        return torch.ones(weight.shape[1], device=weight.device)
    require_finite(importance, "the importance of the input columns")
    importance = importance.to(weight.device, torch.float32)
    # Columns that calibration never excited still count a little, so their group keeps a sensible range.
    return importance / importance.mean().clamp(min=torch.finfo(torch.float32).tiny) + 1e-4


def _weighted_error(column_weights: Tensor) -> Measure:
    return lambda change: change.square_().mul_(column_weights).sum(-1, keepdim=True)


def _output_error(inputs: Tensor, groups: int) -> Measure:
    require_finite(inputs, "the sample inputs")
    grouped = inputs.float().unflatten(1, (groups, -1)).transpose(0, 1)
    # At most g rows with the same Gram matrix as all T of them, hence the same errors.
    basis = torch.linalg.qr(grouped, mode="r").R.transpose(1, 2).contiguous()
    return lambda change: (change.transpose(0, 1) @ basis).square_().sum(-1, keepdim=True).transpose(0, 1)


def _row_chunks(weight: Tensor, groups: int) -> Iterator[Tensor]:
    elements = _CHUNK_ELEMENTS_GPU if weight.is_cuda else _CHUNK_ELEMENTS_CPU
    for rows in weight.split(max(1, elements // weight.shape[1])):
        yield rows.float().unflatten(1, (groups, -1))


def _search_rows(rows: Tensor, measure: Measure, scheme: Scheme, scale_dtype: torch.dtype) -> GroupScales:
    span = GroupRange.of(rows, scheme)
    best = _Best(rows, measure, span, scale_dtype)
    for scale, zero in span.candidates():
        best.consider(scale, zero)
    for scale, zero in span.neighbours(best.scale, best.zero):
        best.consider(scale, zero)
    return _stored(best.scale, best.zero, scale_dtype)


def _stored(scale: Tensor, zero: Tensor, dtype: torch.dtype) -> GroupScales:
    return GroupScales(scale.squeeze(-1).to(dtype), zero.squeeze(-1).to(torch.uint8))


class _Best:
    """The best scale and zero point seen so far of each group, over candidates `[R, G, 1]`."""

    def __init__(self, rows: Tensor, measure: Measure, span: GroupRange, scale_dtype: torch.dtype) -> None:
        self._rows = rows
        self._measure = measure
        self._scheme = span.scheme
        self._dtype = scale_dtype
        self._scratch = torch.empty_like(rows)
        scale, self.zero = span.full()
        self.scale = storable(scale, scale_dtype)
        self.error = torch.full_like(self.scale, torch.inf)

    def consider(self, scale: Tensor, zero: Tensor) -> None:
        scale = storable(scale, self._dtype)
        error = self._error(scale, zero)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)

    def _error(self, scale: Tensor, zero: Tensor) -> Tensor:
        rounded = round_to_grid(self._rows, scale, zero, self._scheme, self._scratch)
        return self._measure(rounded.sub_(self._rows))

"""Scales, zero points and codes of integer groups, and dynamic 8-bit activations.

The search minimises `sum_i importance_i * (w_i - q_i)^2` of each group. With importance = diag(H), the mean square of
each input, this is the layer's output error when inputs are taken as uncorrelated; without importance it is plain MSE.
Every candidate is rounded to the dtype it will be stored in before it is judged.

On a CPU the search by weighted error, and the rounding to codes, are compiled code (`compress/cpu/c/rounding`). It adds
errors up in an order of its own: where two candidates differ by less than the rounding of those sums, torch may choose
the other. Given scales lead to the same codes in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Activations
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.integer import Int
from compress.common.device import divide, require_finite
from compress.cpu.binding import BEST, library
from compress.cpu.rounding import RangeTrials, encode_groups, round_groups, search_ranges

_NO_SCALE = 1e-30  # of a group of zeros
_TINY = torch.finfo(torch.float32).tiny
# Fractions of the full range that are tried first; clipping to a quarter is already rare at 2 bits.
_COARSE = tuple(1.0 - 0.04 * step for step in range(20))
# Fractions of either side of an asymmetric range, in all combinations.
_SIDES = (1.0, 0.8, 0.6, 0.4, 0.25)
LIKELY = 10
"""Ranges with the least weighted error, of which the error of outputs is measured: with 4 bits and more the best by
that error is mostly among them. With fewer bits it is measured of all."""
# Around the best of them, closer than one coarse step.
_FINE = (0.97, 0.98, 0.99, 1.01, 1.02, 1.03)


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Range of each group `[R, G, 1]`: `low <= 0 <= high`, and the signed element of largest magnitude."""

    low: Tensor
    high: Tensor
    scheme: Int

    @classmethod
    def of(cls, rows: Tensor, scheme: Int) -> GroupRange:
        return cls(rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0), scheme)

    def full(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point that cover the range."""
        return self.shrunk(1.0) if self.scheme.symmetric else self.between(1.0, 1.0)

    def shrunk(self, fraction: float) -> tuple[Tensor, Tensor]:
        """Symmetric: the element of largest magnitude, with its sign, lands on code 0, i.e. on -midpoint."""
        peak = torch.where(self.high > -self.low, self.high, self.low)
        return peak * (-fraction / self.scheme.zero), torch.full_like(peak, self.scheme.zero)

    def between(self, below: float, above: float) -> tuple[Tensor, Tensor]:
        """Asymmetric: codes span `below` of the negative side and `above` of the positive one."""
        low, high = self.low * below, self.high * above
        scale = (high - low) / self.scheme.max_code
        return scale, (-low / scale.clamp(min=_TINY)).round_().clamp_(0, self.scheme.max_code)

    def candidates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields scales and zero points for the full range and ever smaller parts of it."""
        for below, above in range_trials(self.scheme).parts:
            yield self.shrunk(below) if self.scheme.symmetric else self.between(below, above)

    def neighbours(self, scale: Tensor, zero: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scales and zero points close to those of a good candidate."""
        for factor, shift in range_trials(self.scheme).neighbours:
            yield scale * factor, (zero + shift).clamp_(0, self.scheme.max_code)


@cache
def range_trials(scheme: Int) -> RangeTrials:
    """Returns the parts of a range that are tried, and the neighbours of the best; symmetric: fractions with a sign."""
    near = [(factor, 0) for factor in _FINE]
    if scheme.symmetric:
        half = scheme.zero
        # The first fraction clips nothing on the short side either: the range of an unsigned scale.
        fractions = (half / (half - 1), *_fractions(scheme.bits))
        return RangeTrials([(sign * each,) * 2 for each in fractions for sign in (1, -1)], near, scheme.max_code, True)
    parts = [(each, each) for each in _fractions(scheme.bits)] + list(permutations(_SIDES, 2))
    near += [(factor, shift) for shift in (-1, 1) for factor in (1.0, *_FINE)]
    return RangeTrials(parts, near, scheme.max_code, False)


def _fractions(bits: int) -> tuple[float, ...]:
    """Fractions of a range to try: with 4 bits and more not below half, where AWQ's released code stops."""
    return _COARSE if bits < 4 else tuple(fraction for fraction in _COARSE if fraction > 0.5)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they will be read back; one that would be stored as 0 (a group of zeros) becomes a harmless 1."""
    limit = torch.finfo(dtype).max
    rounded = scale.clamp(-limit, limit).to(dtype).float()
    return torch.where(rounded.abs() < _TINY, torch.ones_like(rounded), rounded)


def round_to_grid(rows: Tensor, scale: Tensor, zero: Tensor, scheme: Int, out: Tensor) -> Tensor:
    """The nearest representable values of `rows [R, G, g]`, written to `out`."""
    codes = torch.mul(rows, scale.reciprocal(), out=out).round_()
    if scheme.symmetric:
        codes.clamp_(-scheme.zero, scheme.zero - 1)
    else:
        codes.add_(zero).clamp_(0, scheme.max_code).sub_(zero)
    return codes.mul_(scale)


# Maps the change of a block of groups `[R, G, g]`, which it may overwrite, to its error `[R, G, 1]`.
Measure = Callable[[Tensor], Tensor]

# A chunk of rows and its scratch copies stay in the processor's cache; a GPU wants more work per launch.
_CHUNK_ELEMENTS_CPU = 1 << 19
_CHUNK_ELEMENTS_GPU = 1 << 24


@dataclass(frozen=True, slots=True)
class GroupScales:
    """`scales [O, G]` in the stored dtype (may be negative, never zero) and `zero_points [O, G]` uint8."""

    scales: Tensor
    zero_points: Tensor


def search_scales(
    weight: Tensor,
    scheme: Int,
    importance: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    *,
    inputs: Tensor | None = None,
    instruction_set: int | None = BEST,
) -> GroupScales:
    """The scales and zero points with the least weighted squared error.

    Symmetric scales use the signed full range: the group's largest element may land on the code `-2^(bits-1)`, which
    has no positive counterpart, by giving the scale its sign. Asymmetric ranges contain 0, so 0 is stored exactly.

    Args:
        weight: `[O, I]`, any float dtype.
        scheme: bits, group size, symmetry.
        importance: `[I]`, not negative; the mean square of each input. None weighs all columns alike.
        scale_dtype: dtype in which scales are stored; None is bfloat16.
        inputs: `[T, I]` sample inputs in place of importance: the error is then that of each group's share of the
            outputs, correlations within the group included.
        instruction_set: of the compiled code; None keeps to torch. With inputs it chooses the
            `LIKELY` ranges of which the error of outputs is measured; torch measures that of all.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight, importance or inputs.
    """
    groups, dtype = scheme.num_groups(weight.shape[1]), scale_dtype or torch.bfloat16
    require_finite(weight, "the weight")
    compiled = None if range_kernel(weight.device) == "torch" else instruction_set
    if inputs is None:
        columns = column_weights(weight, importance)
        if compiled is not None:
            return _search_compiled(weight, scheme, columns, dtype, compiled, 1)[0]
        return _search(weight, scheme, _weighted_error(columns.view(groups, -1)), dtype, [])
    inputs = inputs.to(weight.device)
    measure, likely = _output_error(inputs, groups), list[GroupScales]()
    if compiled is not None and scheme.bits >= 4:
        columns = column_weights(weight, inputs.float().square().mean(0))
        likely = _search_compiled(weight, scheme, columns, dtype, compiled, LIKELY)
    return _search(weight, scheme, measure, dtype, likely)


def range_kernel(device: torch.device) -> str:
    """Returns the kernel that searches ranges by weighted error on a device."""
    return "C" if device.type == "cpu" and library() is not None else "torch"


def range_scales(
    weight: Tensor, scheme: Int, scale_dtype: torch.dtype | None = None, *, instruction_set: int | None = BEST
) -> GroupScales:
    """Returns the scales that span each group's range, without a search; `instruction_set` as above."""
    require_finite(weight, "the weight")
    dtype = scale_dtype or torch.bfloat16
    if instruction_set is not None and range_kernel(weight.device) == "C":
        return _full_compiled(weight.float().contiguous(), scheme, dtype, instruction_set)
    rows = weight.float().unflatten(1, (scheme.num_groups(weight.shape[1]), -1))
    scale, zero = GroupRange.of(rows, scheme).full()
    return _stored(storable(scale, dtype), zero, dtype)


def _full_compiled(weight: Tensor, scheme: Int, dtype: torch.dtype, instruction_set: int) -> GroupScales:
    full = RangeTrials([(1.0, 1.0)], (), scheme.max_code, scheme.symmetric)
    # A single range is not judged, so any weights of columns will do.
    scales, zeros = search_ranges(weight, weight[0], scheme.num_groups(weight.shape[1]), full, dtype, instruction_set)
    return GroupScales(scales[0], zeros[0])


def round_in_range(
    weight: Tensor, scheme: Int, scale_dtype: torch.dtype | None = None, *, instruction_set: int | None = BEST
) -> Tensor:
    """Rounds `weight [O, I]` under its `range_scales`, as float32; cheap, for searches that try many candidates."""
    if instruction_set is not None and range_kernel(weight.device) == "C":
        exact = weight.float().contiguous()
        found = _full_compiled(exact, scheme, scale_dtype or torch.bfloat16, instruction_set)
        return round_groups(exact, found.scales.float(), found.zero_points, scheme.max_code, instruction_set)
    rounded = torch.empty(weight.shape, device=weight.device)
    groups = scheme.num_groups(weight.shape[1])
    # The chunks of `rounded` are views: what is written to them lands there.
    for rows, out in zip(row_chunks(weight, groups), row_chunks(rounded, groups), strict=True):
        scale, zero = GroupRange.of(rows, scheme).full()
        round_to_grid(rows, storable(scale, scale_dtype or torch.bfloat16), zero, scheme, out)
    return rounded


def encode(weight: Tensor, scales: GroupScales, scheme: Int, *, instruction_set: int | None = BEST) -> CodedWeight:
    """Rounds `weight [O, I]` to the nearest codes under given scales (half to even), `instruction_set` as above."""
    scale, zero = scales.scales.float(), scales.zero_points
    if instruction_set is not None and range_kernel(weight.device) == "C":
        exact = weight.float().contiguous()
        codes = encode_groups(exact, scale.contiguous(), zero.contiguous(), scheme.max_code, instruction_set)
    else:
        grouped = weight.float().unflatten(1, (scale.shape[1], -1))
        steps = (grouped / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1))
        codes = steps.clamp_(0, scheme.max_code).to(torch.uint8).flatten(1)
    return scheme.weight(codes, scales.scales, zero)


def divided(values: Tensor, scales: Tensor) -> Tensor:
    """Returns `values / scales`, zero where the scale is zero."""
    safe = torch.where(scales.abs() < _NO_SCALE, torch.ones_like(scales), scales)
    return torch.where(scales.abs() < _NO_SCALE, torch.zeros_like(values), values / safe)


def column_weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Returns the weight of each column's squared error `[I]`, 1 on average; None weighs all alike."""
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


def error_of_groups(
    weight: Tensor, groups: int, importance: Tensor | None = None, inputs: Tensor | None = None
) -> Measure:
    """Returns the error of each group of columns by which scales of `weight [O, I]` are chosen; arguments and errors as
    those of `search_scales`."""
    require_finite(weight, "the weight")
    if inputs is not None:
        return _output_error(inputs.to(weight.device), groups)
    return _weighted_error(column_weights(weight, importance).view(groups, -1))


def row_chunks(weight: Tensor, groups: int) -> Iterator[Tensor]:
    """Yields some rows at a time of `weight [O, I]`, as float32 `[R, G, g]`."""
    elements = _CHUNK_ELEMENTS_GPU if weight.is_cuda else _CHUNK_ELEMENTS_CPU
    for rows in weight.split(max(1, elements // weight.shape[1])):
        yield rows.float().unflatten(1, (groups, -1))


def _search_compiled(
    weight: Tensor, scheme: Int, columns: Tensor, dtype: torch.dtype, instruction_set: int, kept: int
) -> list[GroupScales]:
    """Returns the `kept` ranges of each group with the least error, weighted by `columns [I]`, the best first."""
    groups, trials = scheme.num_groups(weight.shape[1]), range_trials(scheme)
    if kept > 1:
        trials = replace(trials, neighbours=())  # of the best by this error, which are much alike
    exact = weight.float().contiguous()
    found = search_ranges(exact, columns, groups, trials, dtype, instruction_set, kept)
    return [GroupScales(*each) for each in zip(*found, strict=True)]


def _search(
    weight: Tensor, scheme: Int, measure: Measure, dtype: torch.dtype, likely: list[GroupScales]
) -> GroupScales:
    """Returns the ranges of least error of `likely` ones, or of all where there are none, and of their neighbours."""
    found, begin = list[GroupScales](), 0
    for rows in row_chunks(weight, scheme.num_groups(weight.shape[1])):
        part = slice(begin, begin + len(rows))
        given = [(each.scales[part, :, None].float(), each.zero_points[part, :, None].float()) for each in likely]
        span = GroupRange.of(rows, scheme)
        best = _Best(rows, measure, span, dtype)
        for scale, zero in given or span.candidates():
            best.consider(scale, zero)
        for scale, zero in span.neighbours(best.scale, best.zero):
            best.consider(scale, zero)
        found.append(_stored(best.scale, best.zero, dtype))
        begin = part.stop
    return GroupScales(torch.cat([each.scales for each in found]), torch.cat([each.zero_points for each in found]))


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
        scale, self.zero = next(span.candidates())
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


FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
"""The largest number; there is no infinity."""
LARGEST = {Activations.INT8: 127, Activations.INT4: 8, Activations.FP8: MAX_FP8}
"""Numbers that the largest input of a token becomes before rounding. 4 bits clip it by a step where it is positive, so
that all steps are smaller. Division by 8 leaves no tie there, as 7.5 does, which the least error would break."""


def quantize_tokens(x: Tensor, kind: Activations = Activations.INT8) -> tuple[Tensor, Tensor]:
    """Quantized activations q8 `[M, I]` and scales `[M, 1]`, with `x ~ q8 * scale`.

    Both are float32 (float64 for float64 input), q8 with integral values from -127 to 127, of 4 bits from -8 to 7, or
    those of e4m3 from -448 to 448. A token's result never depends on its neighbours in the batch. A row of zeros gets
    scale 0 and zeros; a row that is not finite keeps a scale that is not finite.
    """
    exact = x.double() if x.dtype == torch.float64 else x.float()
    scale = divide(exact.abs().amax(-1, keepdim=True), LARGEST[kind])
    q8 = exact / scale.clamp_min(torch.finfo(exact.dtype).tiny)
    return (q8.to(FP8).to(exact.dtype) if kind == Activations.FP8 else round_integers(q8, kind.bits)), scale


def round_integers(x: Tensor, bits: int) -> Tensor:
    """Rounds `x` to signed integers of some bits, half to even."""
    past = 1 << (bits - 1)
    return x.round().clamp_(-past, past - 1)


def round_tokens(x: Tensor, kind: Activations = Activations.INT8) -> Tensor:
    """`x [M, I]` as a product with such activations sees it, in its own dtype."""
    q8, scale = quantize_tokens(x, kind)
    return (q8 * scale).to(x.dtype)

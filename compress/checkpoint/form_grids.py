"""Grids of the forms that are codes under scales: the searches for their scales, by the names that forms give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.float_scales import (
    E2M1,
    E4M3,
    Codebook,
    GroupSearch,
    Numbers,
    RangeSearch,
    ScaleSearch,
    positive_floats,
)
from compress.checkpoint.gguf.rounding.k import search_weight
from compress.checkpoint.gguf.rounding.search import groups_of, search_ranges, search_scales
from compress.checkpoint.grids import BlockGrid, FloatGrid, Grid, IntegerGrid, divisors
from compress.checkpoint.scale_search import FP8, storable
from compress.checkpoint.scale_search import search_scales as search_integers
from compress.checkpoint.weights.coded import EXPONENTS, FLOAT8, NAN_EXPONENT, CodedWeight, powers_of_two
from compress.checkpoint.weights.forms import E2M1_VALUES
from compress.common.device import require_finite
from compress.common.errors import SchemeError

DIVISOR = 2048.0
"""Number that stored scales are divided by wherever that fits a matrix. Engines that fuse projections want one number
for all of them, and a power of two leaves the values of scales exact in 16 bits."""
FITTING = 2.0**-7, 6 * 448 / DIVISOR
"""Largest magnitudes of matrices whose scales have all their bits with that divisor, of groups 1/100 as large too."""
CHUNK = 2**18
"""Weights whose scales are searched at one time."""


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the scales of a weight `[O, I]`.

    Attributes:
        form: a `Coded` scheme.
        importance: `[I]`, of the squared error of each column; None weighs all alike.
        scale_dtype: the model's, of scales that are stored in it; None is bfloat16.
        inputs: `[T, I]`, for which the output error is minimized.
        spans: whether the scales that span each group are taken without a search.
    """

    form: Any
    weight: Tensor
    importance: Tensor | None = None
    scale_dtype: torch.dtype | None = None
    inputs: Tensor | None = None
    spans: bool = False

    def grid(self) -> Grid[CodedWeight]:
        """Returns the grid under the scales found. Raises SchemeError for a form that no search is for, or a shape."""
        self.form.num_groups(self.weight.shape[1])
        if self.form.scales.search not in SEARCHES:
            raise SchemeError(f"{self.form} has no rounding to nearest", "Choose integers or 8-bit floats")
        return SEARCHES[self.form.scales.search](self)

    def rounded(self) -> CodedWeight:
        """Rounds the weight to the nearest values, or to those that the search for scales found with them."""
        grid = self.grid()
        return grid.start if isinstance(grid, BlockGrid) and self.form.scales.step_bits else grid.encode(self.weight)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scales that are stored in the model's."""
        return self.scale_dtype or torch.bfloat16

    @property
    def numbers(self) -> Numbers:
        """Numbers that codes stand for."""
        if self.form.numbers == FLOAT8:
            return E4M3()
        return E2M1() if self.form.code_values == E2M1_VALUES else Codebook(self.form.code_values)

    def floats(self, steps: Tensor, columns: int, **parts: Tensor) -> Grid[CodedWeight]:
        """The grid under float32 scales `steps [O, G]` of groups of some columns, stored as `parts`."""

        def make(codes: Tensor) -> CodedWeight:
            return CodedWeight(codes.view(FP8) if self.form.numbers == FLOAT8 else codes, scheme=self.form, **parts)

        return FloatGrid(self.numbers, steps, columns, make)

    def found(self, scales: ScaleSearch) -> Tensor:
        """Returns what a search for scales finds, `[O, G]`."""
        weight, group = self.weight, self.form.group_size
        return (
            scales.in_range(weight, group) if self.spans else scales.best(weight, group, self.importance, self.inputs)
        )


def integers(search: Search) -> Grid[CodedWeight]:
    """Scales of the model's dtype and zero points of integers."""
    found = search_integers(search.weight, search.form, search.importance, search.scale_dtype, inputs=search.inputs)
    return IntegerGrid(found, search.form)


def few_scales(search: Search) -> Grid[CodedWeight]:
    """Scales that are powers of two, or 8-bit floats divided by a number of the matrix."""
    form, is_power = search.form, search.form.scales.dtype == EXPONENTS
    divisor = 1.0 if is_power else divisor_of(float(search.weight.abs().max()))
    known = powers_of_two(torch.arange(NAN_EXPONENT)) if is_power else positive_floats() / divisor
    scales = GroupSearch(search.numbers, form.scales.tried, torch.uint8, known, first=0 if is_power else 1)
    found = search.found(scales)
    parts = {"scales": found}
    if not is_power:
        divided_by = torch.full((len(found), 1), divisor, device=found.device)
        parts = {"scales": found.view(FP8), "divisors": divided_by}
    return search.floats(scales.steps_of(found), form.group_size, **parts)


def any_scales(search: Search) -> Grid[CodedWeight]:
    """Scales that are numbers of the model's dtype."""
    scales = RangeSearch(search.numbers, search.form.scales.tried, search.dtype)
    found = search.found(scales)
    return search.floats(scales.steps_of(found), search.form.group_size, scales=found)


def scales_of_rows(search: Search) -> Grid[CodedWeight]:
    """One scale of the model's dtype for each row."""
    require_finite(search.weight, "the weight")
    numbers, dtype = search.numbers, search.dtype

    def best(rows: Tensor) -> Tensor:
        def error(scale: Tensor) -> Tensor:
            squares = (numbers.nearest(rows / scale) * scale - rows).square_()
            return (squares if search.importance is None else squares.mul_(search.importance)).sum(1, keepdim=True)

        full = storable(rows.abs().amax(1, keepdim=True) / numbers.largest, dtype)
        tried = [storable(full * step, dtype) for step in search.form.scales.tried]
        return full if search.spans else _least_error(tried, error)

    rows = search.weight.split(max(1, CHUNK // search.weight.shape[1]))
    scales = torch.cat([best(each.float()) for each in rows])
    return search.floats(scales, search.weight.shape[1], scales=scales.to(dtype))


def scales_of_blocks(search: Search) -> Grid[CodedWeight]:
    """One float32 scale for each block of rows and columns: of the model's dtype, in which transformers reads them."""
    weight, (rows, columns), importance = search.weight, search.form.block, search.importance
    require_finite(weight, "the weight")
    if search.inputs is not None and importance is None:
        importance = search.inputs.float().square().mean(0)
    padding = 0, -weight.shape[1] % columns
    counts = torch.ones_like(weight[0], dtype=torch.float32) if importance is None else importance.float()
    counts = functional.pad(counts, padding).view(-1, columns)

    def best(part: Tensor) -> Tensor:
        blocks: Tensor = functional.pad(part, padding).unflatten(1, (-1, columns))

        def error(scale: Tensor) -> Tensor:
            repeated = scale.unsqueeze(-1)
            rounded = search.numbers.nearest(blocks / repeated) * repeated
            return (rounded - blocks).square().mul_(counts).sum((0, 2))

        full = blocks.abs().amax((0, 2)) / search.numbers.largest
        tried = search.form.scales.tried[: 1 if search.spans else None]
        return _least_error([storable(full * step, search.dtype) for step in tried], error)

    scales = torch.stack([best(each.float()) for each in weight.split(rows)])
    scales = scales.repeat_interleave(rows, 0)[: len(weight)].contiguous()
    return search.floats(scales, columns, scales=scales)


def _least_error(scales: Sequence[Tensor], error: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns, place by place, those of several scales with the least error, the first of equal ones."""
    best, least = scales[0], torch.full_like(scales[0], torch.inf)
    for scale in scales:
        found = error(scale)
        best, least = torch.where(found < least, scale, best), torch.minimum(found, least)
    return best


def signed_scales(search: Search) -> Grid[CodedWeight]:
    """Scales in float16, which may be negative."""
    form, numbers = search.form, search.numbers
    extremes = form.code_values[0], form.code_values[-1]
    blocks = groups_of(search.weight, form.group_size, search.importance)
    found = [search_scales(each, numbers.nearest, extremes) for each in blocks]
    scales = torch.cat(found).reshape(len(search.weight), -1)
    return search.floats(divisors(scales), form.group_size, scales=scales.to(torch.float16))


def ranges(search: Search) -> Grid[CodedWeight]:
    """Scales and minima in float16."""
    form, weight = search.form, search.weight
    blocks = groups_of(weight, form.group_size, search.importance)
    found = zip(*(search_ranges(each, form.max_code, below_zero=False) for each in blocks), strict=True)
    scales, minima = (torch.cat(each).reshape(len(weight), -1).to(torch.float16) for each in found)
    codes = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
    return BlockGrid(CodedWeight(codes, scales, form, minima=-minima))


def integer_scales(search: Search) -> Grid[CodedWeight]:
    """Scales and minima that are integers times a float16 of a block."""
    parts = search_weight(search.weight, search.form, search.importance)
    return BlockGrid(search.form.of(parts.named(), len(search.weight)))


SEARCHES: Mapping[str, Callable[[Search], Grid[CodedWeight]]] = {
    "integers": integers,
    "few scales": few_scales,
    "any scales": any_scales,
    "scales of rows": scales_of_rows,
    "scales of blocks": scales_of_blocks,
    "signed scales": signed_scales,
    "ranges": ranges,
    "integer scales": integer_scales,
}
"""Searches by the names in `Scales.search`."""


def divisor_of(largest: float) -> float:
    """The global scale of a matrix whose largest magnitude is given: a power of two."""
    if FITTING[0] <= largest <= FITTING[1] or not 0 < largest < math.inf:
        return DIVISOR
    return 2.0 ** max(-126, min(126, math.floor(math.log2(6 * 448 / largest))))

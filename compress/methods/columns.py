"""The loop of GPTQ and SparseGPT: columns are changed one by one, and those still to come make up for the error.

What happens to a column is rounding to a grid, pruning, or both; see `gptq` and `sparsegpt`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scales import GroupScales
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.methods.pruning import keep_pattern, keep_share
from compress.native.binding import BEST, library
from compress.native.columns import LONGEST_STRETCH, ColumnGrid, ColumnPattern, NativeColumns

# Columns changed one by one before their errors are passed on with one matrix product. A multiple of every pattern.
_LEAF_COLUMNS = 16
# SparseGPT compares the weights of so many columns at once. The paper takes 128; fewer let more feedback in.
_CHOICE_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Grid:
    """Where values may lie: scales of a weight `[O, I]` and its scheme."""

    scales: GroupScales
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Choice:
    """What the loop prunes on its way: N:M by `pattern`, or a `share` of all weights.

    A share is met stretch by stretch. The paper takes the same share of each; here a stretch loses as many weights as
    it would if all of them were compared at the outset, so that important columns keep more.

    Attributes:
        spread: `[I]`, in the order of the loop: a weight's score is its square times that of its column's spread, the
            least error that removing it can cause (SparseGPT, section 3.1).
    """

    spread: Tensor
    pattern: Sparsity | None
    share: float


class Columns:
    """The weight's columns in the order of the loop, each a contiguous row of a transposed copy `[I, O]`.

    On a CPU the columns between two matrix products are changed by compiled code where there is any. It adds in another
    order than torch does, so a few codes on the verge of two differ; its own do not depend on the machine.

    Attributes:
        targets: the column plus all feedback so far; without a grid, its new value in the end.
        errors: the original column, minus its new value once it has one.
        codes: uint8, filled column by column where there is a grid.
        kept: bool, False where a weight is pruned; None when nothing is.
    """

    def __init__(
        self,
        weight: Tensor,
        order: Tensor,
        feedback: Tensor,
        grid: Grid | None,
        kept: Tensor | None = None,
        choice: Choice | None = None,
        *,
        instruction_set: int | None = BEST,
    ) -> None:
        """`instruction_set` is that of the compiled code; None keeps to torch."""
        self.errors = weight.float().T.contiguous()[order]
        self.targets = self.errors.clone()
        self.codes = torch.empty(self.errors.shape, dtype=torch.uint8, device=weight.device)
        self.kept = None if kept is None else kept.T.contiguous()[order]
        if choice is not None:
            self.kept = self._first_guess(choice)
        self._order, self._feedback, self._choice = order, feedback, choice
        self._grid = None if grid is None else _ColumnGrid(grid, weight.shape[1], order)
        self._native: NativeColumns | None = None
        if instruction_set is not None and weight.device.type == "cpu" and library() is not None:
            self._native = self._compiled(instruction_set)
        self._leaf_columns = self._longest_leaf()

    def run(self) -> None:
        """Changes every column."""
        self._change(0, len(self.errors), chosen=False)

    @property
    def values(self) -> Tensor:
        """`[I, O]`, what has become of the columns where there is no grid."""
        return self.targets

    def in_original_order(self, columns: Tensor) -> Tensor:
        """`[O, I]` of columns `[I, O]` in the loop's order."""
        restored = torch.empty_like(columns)
        restored[self._order] = columns
        return restored.T.contiguous()

    def _change(self, start: int, stop: int, chosen: bool) -> None:
        """Changes columns `start` to `stop`. Halving the range turns nearly all feedback into large matrix products;
        it is the lazy update of GPTQ's section 3.3 at every block size at once."""
        if self._choice is not None and not self._choice.pattern and not chosen and stop - start <= _CHOICE_COLUMNS:
            self._choose_share(start, stop)
            chosen = True
        leaf = self._leaf_columns
        if stop - start <= leaf:
            return self._native.change(start, stop) if self._native else self._change_leaf(start, stop)
        middle = start + -(-(stop - start) // (2 * leaf)) * leaf
        self._change(start, middle, chosen)
        self.targets[middle:stop].addmm_(self._feedback[start:middle, middle:stop].T, self.errors[start:middle])
        return self._change(middle, stop, chosen)

    def _first_guess(self, choice: Choice) -> Tensor:
        """What is kept before any column is changed: all where a pattern decides later."""
        if choice.pattern:
            return torch.ones_like(self.errors, dtype=torch.bool)
        return keep_share((self.errors * choice.spread.unsqueeze(-1)).square(), choice.share, per_output=False)

    def _compiled(self, instruction_set: int) -> NativeColumns:
        pattern = self._choice.pattern if self._choice is not None else None
        return NativeColumns(
            self.targets,
            self.errors,
            self._feedback,
            self.codes,
            self.kept,
            None if self._grid is None else self._grid.compiled,
            None if pattern is None else ColumnPattern(pattern.kept, pattern.of, self._choice.spread.contiguous()),
            instruction_set,
        )

    def _longest_leaf(self) -> int:
        if self._native is None:
            return _LEAF_COLUMNS
        shares = self._choice is not None and not self._choice.pattern
        return min(LONGEST_STRETCH, _CHOICE_COLUMNS) if shares else LONGEST_STRETCH

    def _change_leaf(self, start: int, stop: int) -> None:
        pattern = self._choice.pattern if self._choice is not None else None
        for column in range(start, stop):
            if pattern and column % pattern.of == 0:
                self._choose_pattern(start, column, pattern)
            target = self.targets[column]
            if column > start:
                target.addmv_(self.errors[start:column].T, self._feedback[start:column, column])
            value = target if self._grid is None else self._grid.round(target, column, self.codes, self.kept)
            if self.kept is not None:
                value = value.masked_fill_(~self.kept[column], 0.0)
            self.errors[column].sub_(value)

    def _choose_pattern(self, leaf: int, column: int, pattern: Sparsity) -> None:
        """Chooses among the next `of` columns, with all the feedback there is by now."""
        stop = column + pattern.of
        targets = self.targets[column:stop]
        if column > leaf:
            targets = targets.addmm(self._feedback[leaf:column, column:stop].T, self.errors[leaf:column])
        self.kept[column:stop] = keep_pattern(self._score(targets, column, stop).T, pattern).T

    def _choose_share(self, start: int, stop: int) -> None:
        score = self._score(self.targets[start:stop], start, stop)
        gone = 1 - float(self.kept[start:stop].double().mean())
        self.kept[start:stop] = keep_share(score, gone, per_output=False)

    def _score(self, targets: Tensor, start: int, stop: int) -> Tensor:
        """SparseGPT's score of columns `start` to `stop`, given what the columns before them feed back to each.

        A target counts on every column before it having its final value. These have none yet: with values x they would
        be `x = target + (original - x) M'`, M' being the feedback among them, and that is solved for x.
        """
        original = self.errors[start:stop]
        among = self._feedback[start:stop, start:stop].T
        change = torch.linalg.solve_triangular(among, targets - original, upper=False, unitriangular=True)
        return ((original + change) * self._choice.spread[start:stop, None]).square()


class _ColumnGrid:
    """Scales and zero points by column of the loop."""

    def __init__(self, grid: Grid, num_columns: int, order: Tensor) -> None:
        self._scale = grid.scales.scale.float().T.contiguous()
        self._zero = grid.scales.zero.float().T.contiguous()
        self._max_code = grid.scheme.max_code
        group = order // (num_columns // grid.scales.scale.shape[1])
        self.compiled = ColumnGrid(self._scale, self._zero, group, self._max_code)
        self._group = group.tolist()

    def round(self, target: Tensor, column: int, codes: Tensor, kept: Tensor | None) -> Tensor:
        """The nearest value on the grid `[O]`; writes its codes, the zero point for what is pruned."""
        group = self._group[column]
        scale, zero = self._scale[group], self._zero[group]
        found = (target / scale).round_().add_(zero).clamp_(0, self._max_code)
        if kept is not None:
            found = torch.where(kept[column], found, zero)
        codes[column] = found
        return found.sub_(zero).mul_(scale)

"""Column loop of GPTQ and SparseGPT: columns are processed one by one, and the following ones compensate the error.

A column is rounded to a grid, pruned, or both; see `gptq` and `sparsegpt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.checkpoint.grids import Grid, OrderedGrid
from compress.checkpoint.weights import NMSparsity
from compress.cpu.binding import BEST, absence, library
from compress.cpu.gptq import LONGEST_STRETCH, ColumnPattern, CpuColumns
from compress.methods.pruning import keep_pattern, keep_share

if TYPE_CHECKING:
    from compress.methods.shared.column_solver_triton import GpuColumns


@dataclass(frozen=True, slots=True)
class Choice:
    """Pruning inside the loop: N:M by `pattern`, or a `share` of all weights.

    A share is applied to ranges of columns. The paper prunes the same share of each range; here a range loses as many
    weights as in a comparison of all weights before the loop, which keeps more of important columns. `spread`: `[I]`,
    in the order of the loop: a weight's score is its square times that of its column's spread, the least error of
    removing it (SparseGPT, section 3.1).
    """

    spread: Tensor
    pattern: NMSparsity | None
    share: float


class Chooser:
    """Selection of pruned weights among columns without final values.

    Args:
        targets, errors, feedback: tensors of the loop, which it modifies.

    Attributes:
        kept: bool `[I, O]`; initially all weights for a pattern, else those kept by a comparison of all weights.
    """

    def __init__(self, choice: Choice, targets: Tensor, errors: Tensor, feedback: Tensor) -> None:
        self._choice, self._targets, self._errors, self._feedback = choice, targets, errors, feedback
        if choice.pattern:
            self.kept = torch.ones_like(errors, dtype=torch.bool)
        else:
            self.kept = keep_share((errors * choice.spread.unsqueeze(-1)).square(), choice.share, per_output=False)

    @property
    def pattern(self) -> NMSparsity | None:
        """N:M pattern; None for unstructured pruning."""
        return self._choice.pattern

    def choose_pattern(self, leaf: int, column: int) -> None:
        """Selects among the next columns of the pattern with the current feedback, which the targets include for
        columns before `leaf`."""
        pattern = self._choice.pattern
        if pattern is None:
            raise ValueError("a share is selected by ranges of columns")
        stop = column + pattern.m
        targets = self._targets[column:stop]
        if column > leaf:
            targets = targets.addmm(self._feedback[leaf:column, column:stop].T, self._errors[leaf:column])
        self.kept[column:stop] = keep_pattern(self._score(targets, column, stop).T, pattern).T

    def choose_share(self, start: int, stop: int) -> None:
        """Selects the same number among columns `start` to `stop` as initially kept there."""
        score = self._score(self._targets[start:stop], start, stop)
        gone = 1 - float(self.kept[start:stop].double().mean())
        self.kept[start:stop] = keep_share(score, gone, per_output=False)

    def _score(self, targets: Tensor, start: int, stop: int) -> Tensor:
        """Returns SparseGPT's score of columns `start` to `stop`, with the feedback of the columns before them.

        A target assumes final values of all columns before it, which these columns do not have yet. Their values x
        satisfy `x = target + (original - x) M'`, with the feedback M' among them, which is solved for x.
        """
        original = self._errors[start:stop]
        among = self._feedback[start:stop, start:stop].T
        change: Tensor = torch.linalg.solve_triangular(among, targets - original, upper=False, unitriangular=True)
        return ((original + change) * self._choice.spread[start:stop, None]).square()


# Number of columns processed one by one before a matrix product propagates their errors. A multiple of every pattern.
_LEAF_COLUMNS = 16
# The same on a GPU: the number of errors that fit in the registers of a thread.
_GPU_LEAF_COLUMNS = 64
# Number of columns in which SparseGPT compares weights. The paper uses 128; fewer columns include more feedback.
_CHOICE_COLUMNS = 32


def column_kernel(device: torch.device) -> str:
    """Describes the column kernel of a device; for torch, with the reason."""
    if device.type == "cuda":
        return "Triton" if find_spec("triton") else "torch, column by column: Triton is not installed"
    return f"torch, column by column: {absence()}" if absence() else "C"


class GPTQSolver:
    """Solver over the weight's columns in the order of the loop, each a contiguous row of a transposed copy `[I, O]`.

    Columns between two matrix products are processed by a kernel if available: C on a CPU, Triton on a GPU, both for
    integer grids. Their summation order differs from torch, so a few near-tie codes differ. Results of the C code do
    not depend on the machine.

    Attributes:
        targets: column plus all feedback so far; without a grid, finally its new value.
        errors: original column, minus its new value once that is known.
        kept: bool, False for pruned weights; None without pruning.
    """

    def __init__(
        self,
        weight: Tensor,
        order: Tensor,
        feedback: Tensor,
        grid: Grid[Any] | None,
        kept: Tensor | None = None,
        choice: Choice | None = None,
        *,
        instruction_set: int | None = BEST,
        on_gpu: bool | None = None,
    ) -> None:
        """Prepares the loop over `weight [O, I]`.

        Args:
            instruction_set: instruction set of the C code; None uses torch.
            on_gpu: whether to use Triton; None decides by the device of the weight.
        """
        self._grid: OrderedGrid | None = None if grid is None else grid.ordered(order)
        columns = weight.float().T.contiguous()[order]
        self.errors = columns if self._grid is None else self._grid.shifted(columns)
        self.targets = self.errors.clone()
        self.codes = torch.empty(self.errors.shape, dtype=torch.uint8, device=weight.device)
        self.kept = None if kept is None else kept.T.contiguous()[order]
        self._order, self._feedback, self._choice = order, feedback, choice
        self._chooser: Chooser | None = None
        if choice is not None:
            self._chooser = Chooser(choice, self.targets, self.errors, feedback)
            self.kept = self._chooser.kept
        is_compiled = self._grid is None or self._grid.compiled is not None
        if on_gpu is None:
            on_gpu = is_compiled and weight.is_cuda and column_kernel(weight.device) == "Triton"
        self._gpu = self._in_triton() if on_gpu else None
        self._native: CpuColumns | None = None
        on_cpu = weight.device.type == "cpu" and library() is not None and not on_gpu
        if instruction_set is not None and is_compiled and on_cpu:
            self._native = self._compiled(instruction_set)
        self._leaf_columns = self._longest_leaf()

    def run(self) -> None:
        """Processes all columns."""
        self._change(0, len(self.errors), chosen=False)

    @property
    def values(self) -> Tensor:
        """New values of the columns without a grid, `[I, O]`."""
        return self.targets

    def in_original_order(self, columns: Tensor) -> Tensor:
        """Converts columns `[I, O]` in the loop's order to `[O, I]` in the original order."""
        restored = torch.empty_like(columns)
        restored[self._order] = columns
        return restored.T.contiguous()

    def _change(self, start: int, stop: int, chosen: bool) -> None:
        """Processes columns `start` to `stop`. Recursive halving turns nearly all feedback into large matrix products:
        the lazy batch updates of GPTQ, section 3.3, at all block sizes."""
        if self._chooser and not self._pattern and not chosen and stop - start <= _CHOICE_COLUMNS:
            self._chooser.choose_share(start, stop)
            chosen = True
        leaf = self._leaf_columns
        if stop - start <= leaf:
            return self._change_leaf(start, stop)
        middle = start + -(-(stop - start) // (2 * leaf)) * leaf
        self._change(start, middle, chosen)
        self.targets[middle:stop].addmm_(self._feedback[start:middle, middle:stop].T, self.errors[start:middle])
        return self._change(middle, stop, chosen)

    @property
    def _pattern(self) -> NMSparsity | None:
        return self._chooser.pattern if self._chooser else None

    def _in_triton(self) -> GpuColumns:
        from compress.methods.shared.column_solver_triton import GpuColumns

        grid = None if self._grid is None else self._grid.compiled
        return GpuColumns(self.targets, self.errors, self._feedback, self.codes, self.kept, grid)

    def _compiled(self, instruction_set: int) -> CpuColumns:
        pattern, choice = self._pattern, self._choice
        return CpuColumns(
            self.targets,
            self.errors,
            self._feedback,
            self.codes,
            self.kept,
            None if self._grid is None else self._grid.compiled,
            ColumnPattern(pattern.n, pattern.m, choice.spread.contiguous()) if pattern and choice else None,
            instruction_set,
        )

    def _longest_leaf(self) -> int:
        if self._gpu and self._pattern:
            return self._pattern.m  # kept weights are selected between launches
        if not (self._native or self._gpu):
            return _LEAF_COLUMNS
        shares = self._choice is not None and not self._pattern
        longest = LONGEST_STRETCH if self._native else _GPU_LEAF_COLUMNS
        return min(longest, _CHOICE_COLUMNS) if shares else longest

    def _change_leaf(self, start: int, stop: int) -> None:
        if self._gpu:
            if self._chooser and self._pattern:
                self._chooser.choose_pattern(start, start)
            self._gpu.change(start, stop)
        elif self._native:
            self._native.change(start, stop)
        else:
            self._change_by_torch(start, stop)

    def _change_by_torch(self, start: int, stop: int) -> None:
        pattern = self._pattern
        for column in range(start, stop):
            if self._chooser and pattern and column % pattern.m == 0:
                self._chooser.choose_pattern(start, column)
            target = self.targets[column]
            if column > start:
                target.addmv_(self.errors[start:column].T, self._feedback[start:column, column])
            value = target if self._grid is None else self._grid.round(target, column, self.codes, self.kept)
            if self.kept is not None:
                value = value.masked_fill_(~self.kept[column], 0.0)
            self.errors[column].sub_(value)

"""What SparseGPT prunes on the way through the columns, by the weights as they are by then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scheme import Sparsity
from compress.methods.pruning import keep_pattern, keep_share


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


class Chooser:
    """Chooses among columns that have no final value yet.

    Args:
        targets, errors, feedback: those of the loop, which go on changing.

    Attributes:
        kept: bool `[I, O]`: in the beginning all where a pattern decides later, else what a share of all would keep.
    """

    def __init__(self, choice: Choice, targets: Tensor, errors: Tensor, feedback: Tensor) -> None:
        self._choice, self._targets, self._errors, self._feedback = choice, targets, errors, feedback
        if choice.pattern:
            self.kept = torch.ones_like(errors, dtype=torch.bool)
        else:
            self.kept = keep_share((errors * choice.spread.unsqueeze(-1)).square(), choice.share, per_output=False)

    @property
    def pattern(self) -> Sparsity | None:
        """What is chosen with every column that it divides; without one shares are, of stretches."""
        return self._choice.pattern

    def choose_pattern(self, leaf: int, column: int) -> None:
        """Chooses among the next columns of the pattern, with all the feedback there is by now: that of the columns
        before `leaf` is in the targets."""
        pattern = self._choice.pattern
        if pattern is None:
            raise ValueError("a share is chosen by stretches")
        stop = column + pattern.of
        targets = self._targets[column:stop]
        if column > leaf:
            targets = targets.addmm(self._feedback[leaf:column, column:stop].T, self._errors[leaf:column])
        self.kept[column:stop] = keep_pattern(self._score(targets, column, stop).T, pattern).T

    def choose_share(self, start: int, stop: int) -> None:
        """Chooses as many among columns `start` to `stop` as were kept of them at the outset."""
        score = self._score(self._targets[start:stop], start, stop)
        gone = 1 - float(self.kept[start:stop].double().mean())
        self.kept[start:stop] = keep_share(score, gone, per_output=False)

    def _score(self, targets: Tensor, start: int, stop: int) -> Tensor:
        """SparseGPT's score of columns `start` to `stop`, given what the columns before them feed back to each.

        A target counts on every column before it having its final value. These have none yet: with values x they would
        be `x = target + (original - x) M'`, M' being the feedback among them, and that is solved for x.
        """
        original = self._errors[start:stop]
        among = self._feedback[start:stop, start:stop].T
        change = torch.linalg.solve_triangular(among, targets - original, upper=False, unitriangular=True)
        return ((original + change) * self._choice.spread[start:stop, None]).square()

"""Linears that add low-rank products (LoRA, arXiv:2106.09685): to each row of a step those of its adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runtime.backends.base import Linear, Target

RANK_MULTIPLE = 4
"""Ranks are padded to multiples of this, which compiled products take."""

Places = tuple[tuple[str, int, int], ...]
"""Modules of the checkpoint side by side in a linear, with the first and last of their columns."""


@dataclass(frozen=True, slots=True)
class Factors:
    """A product that is added to a weight: `x down^T up^T` is added to `x W^T`.

    Attributes:
        down: `[r, I]`.
        up: `[O, r]`, times the scale.
    """

    down: Tensor
    up: Tensor


@dataclass(slots=True)
class StepAdapters:
    """Adapters of the step that is computed, which all linears of a model read.

    Attributes:
        slots: of each row's adapter, int64 `[T]`, or `[1]` of all rows; -1 for none.
    """

    slots: Tensor = field(default_factory=lambda: torch.tensor([-1]))
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def begin(self, slots: Tensor) -> None:
        """Takes the slots of the rows of a step."""
        self.slots, self._masks = slots, {}

    def of_rows(self, count: int) -> Tensor:
        """Returns the slots of as many rows, int64 `[T]`."""
        return self.slots.expand(count).contiguous()

    @contextmanager
    def only(self, slot: int) -> Iterator[None]:
        """Lets one adapter compute all rows for a while."""
        before = self.slots, self._masks
        self.begin(self.slots.new_tensor([slot]))
        try:
            yield
        finally:
            self.slots, self._masks = before

    def others(self, owners: tuple[int, ...]) -> Tensor:
        """Returns whether a row has another adapter than each of the ranks, bool `[T, R]` by their slots."""
        if owners not in self._masks:
            self._masks[owners] = self.slots.unsqueeze(1) != self.slots.new_tensor(owners)
        return self._masks[owners]


class Part(NamedTuple):
    """Rows of both factors that one module of an adapter has, and its columns of the linear."""

    slot: int
    first: int
    rank: int
    begin: int
    end: int


class AdaptedLinear:
    """A linear with the products of all adapters on the device, which stand one below the other.

    Attributes:
        down, up: `[R, I]` and `[R, O]`.
        parts: of all slots, in order; none where no adapter changes the linear.
    """

    def __init__(self, base: Linear, places: Places, step: StepAdapters, target: Target) -> None:
        self.base, self.places, self.step, self._target = base, places, step, target
        self.parts: list[Part] = []
        self.down = self.up = torch.empty(0, 0)
        self._owners: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def fill(self, adapters: Sequence[Mapping[str, Factors]]) -> None:
        """Takes the factors of the adapters in all slots, by modules."""
        found = [
            (slot, begin, end, factors[module])
            for slot, factors in enumerate(adapters)
            for module, begin, end in self.places
            if module in factors
        ]
        self.parts, first = [], 0
        for slot, begin, end, own in found:
            rank = -(-len(own.down) // RANK_MULTIPLE) * RANK_MULTIPLE
            self.parts.append(Part(slot, first, rank, begin, end))
            first += rank
        self._owners = tuple(part.slot for part in self.parts for _ in range(part.rank))
        if found:
            self._stack([own for *_, own in found])

    def _stack(self, found: Sequence[Factors]) -> None:
        padded = zip(self.parts, found, strict=True)
        downs = [functional.pad(own.down, (0, 0, 0, part.rank - len(own.down))) for part, own in padded]
        up = torch.zeros(len(self._owners), self.places[-1][2], dtype=self._target.dtype)
        for part, own in zip(self.parts, found, strict=True):
            up[part.first : part.first + own.up.shape[1], part.begin : part.end] = own.up.T
        self.down, self.up = torch.cat(downs).to(self._target.device), up.to(self._target.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[T, O]` of `x [T, I]`."""
        out = self.base(x)
        return self.add(out, x) if self.parts else out

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds the products of adapters to `out [T, O]`, in place."""
        reduced = (x @ self.down.T).masked_fill_(self.step.others(self._owners), 0)
        return out.addmm_(reduced, self.up)

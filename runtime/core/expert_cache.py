"""Cache of experts: the choice of experts on the device, and their slots; all others are in host memory only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

DECAY = 0.98
"""Decay of an expert's frequency per step: about the last 50 steps count."""


@dataclass(frozen=True, slots=True)
class Round:
    """Experts that are on the device at the same time.

    Attributes:
        slots: slot of each expert.
        loads: experts that must be copied first.
    """

    slots: dict[int, int]
    loads: tuple[int, ...]


@dataclass(slots=True)
class ExpertCache:
    """Expert slots of one mixture; a missing expert evicts the least frequently chosen one.

    Attributes:
        num_slots: number of experts on the device.
        popularity: share of tokens routed to each expert in calibration, its initial frequency.
        frequency: decaying mean over steps of whether each expert was chosen.
        slots: slot of each expert on the device.
        queries, hits: number of experts that steps chose, and of those found on the device.
    """

    num_slots: int
    popularity: Sequence[float]
    frequency: list[float] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    queries: int = 0
    hits: int = 0

    def fill(self) -> Round:
        """Resets the slots to the most popular experts."""
        self.frequency = list(self.popularity)
        ranked = sorted(range(len(self.popularity)), key=lambda expert: -self.popularity[expert])
        self.slots = {expert: slot for slot, expert in enumerate(ranked[: self.num_slots])}
        self.queries = self.hits = 0
        return Round(dict(self.slots), tuple(self.slots))

    def rounds(self, wanted: Sequence[int]) -> Iterator[Round]:
        """Yields rounds that together cover each of these distinct experts once, starting with those on the device.

        Later rounds use half of the slots, which keeps frequent experts cached during a prompt that needs all of them.
        A round is valid until the next one is requested.
        """
        self._count(wanted)
        present = [expert for expert in wanted if expert in self.slots]
        missing = [expert for expert in wanted if expert not in self.slots]
        room = self.num_slots - len(present)
        if wanted:
            yield self._round([*present, *missing[:room]])
        step = max(1, self.num_slots // 2)
        for start in range(room, len(missing), step):
            yield self._round(missing[start : start + step])

    def one_by_one(self, wanted: Sequence[int]) -> Iterator[Round]:
        """Yields a round for each of these distinct experts, in the order given."""
        self._count(wanted)
        for place, expert in enumerate(wanted):
            yield self._round([expert], wanted[place:])

    def _count(self, wanted: Collection[int]) -> None:
        for expert, frequency in enumerate(self.frequency):
            self.frequency[expert] = DECAY * frequency + (1 - DECAY) * (expert in wanted)

    def _round(self, experts: Sequence[int], awaited: Collection[int] = ()) -> Round:
        """Assigns the slots of the least frequent experts among the last awaited ones to missing experts."""
        loads = tuple(expert for expert in experts if expert not in self.slots)
        self.queries, self.hits = self.queries + len(experts), self.hits + len(experts) - len(loads)
        others = (expert for expert in self.slots if expert not in experts)
        leaving = sorted(others, key=lambda expert: (expert in awaited, self.frequency[expert]))
        for expert, left in zip(loads, leaving, strict=False):
            self.slots[expert] = self.slots.pop(left)
        return Round({expert: self.slots[expert] for expert in experts}, loads)

"""Experts of a mixture that lie on the device while the others wait in host memory: which, and in which slots."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

DECAY = 0.98
"""Share of an expert's frequency that one step leaves: about the last 50 steps count."""


@dataclass(frozen=True, slots=True)
class Round:
    """Experts that lie on the device at the same time.

    Attributes:
        slots: slot of each expert.
        loads: those of them that must be copied first.
    """

    slots: dict[int, int]
    loads: tuple[int, ...]


@dataclass(slots=True)
class ExpertCache:
    """Slots of one mixture, of which a missing expert takes that of the least frequently chosen one.

    Attributes:
        num_slots: experts that lie on the device.
        popularity: share of tokens that calibration sent to each expert: its frequency before the first step.
        frequency: decaying mean over steps of whether each expert was chosen.
        slots: slot of each expert on the device.
        queries, hits: experts that steps chose, and those of them that lay on the device.
    """

    num_slots: int
    popularity: Sequence[float]
    frequency: list[float] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    queries: int = 0
    hits: int = 0

    def fill(self) -> Round:
        """Begins anew with the most popular experts in the slots."""
        self.frequency = list(self.popularity)
        ranked = sorted(range(len(self.popularity)), key=lambda expert: -self.popularity[expert])
        self.slots = {expert: slot for slot, expert in enumerate(ranked[: self.num_slots])}
        self.queries = self.hits = 0
        return Round(dict(self.slots), tuple(self.slots))

    def rounds(self, wanted: Sequence[int]) -> Iterator[Round]:
        """Yields rounds in which each of these distinct experts lies on the device once, those that do already first.

        Later rounds take half of the slots, so that frequent experts outlast a prompt that needs all of them. A round
        is valid until the next one is taken.
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
        """Gives missing experts the slots of the least frequent ones, of those that are awaited last."""
        loads = tuple(expert for expert in experts if expert not in self.slots)
        self.queries, self.hits = self.queries + len(experts), self.hits + len(experts) - len(loads)
        others = (expert for expert in self.slots if expert not in experts)
        leaving = sorted(others, key=lambda expert: (expert in awaited, self.frequency[expert]))
        for expert, left in zip(loads, leaving, strict=False):
            self.slots[expert] = self.slots.pop(left)
        return Round({expert: self.slots[expert] for expert in experts}, loads)

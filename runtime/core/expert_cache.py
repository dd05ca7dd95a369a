"""Experts of a mixture that lie on the device while the others wait in host memory: which, and in which slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


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
    """Slots of one mixture, of which a missing expert takes the least recently used one.

    Attributes:
        num_slots: experts that lie on the device.
        popular: experts in the order in which they are worth a slot at first.
        slots: slot of each expert on the device, the least recently used first.
        queries, hits: experts that steps chose, and those of them that lay on the device.
    """

    num_slots: int
    popular: Sequence[int]
    slots: dict[int, int] = field(default_factory=dict)
    queries: int = 0
    hits: int = 0

    def fill(self) -> Round:
        """Begins anew with the most popular experts in the slots, the most popular one last to leave."""
        first = reversed(self.popular[: self.num_slots])
        self.slots = {expert: slot for slot, expert in enumerate(first)}
        self.queries = self.hits = 0
        return Round(dict(self.slots), tuple(self.slots))

    def rounds(self, wanted: Sequence[int]) -> Iterator[Round]:
        """Yields rounds in which each of these distinct experts lies on the device once, those that do already first.

        A round is valid until the next one is taken.
        """
        present, missing = self._look_up(wanted)
        room = self.num_slots - len(present)
        if present or missing:
            yield self._round([*present, *missing[:room]])
        for start in range(room, len(missing), self.num_slots):
            yield self._round(missing[start : start + self.num_slots])

    def one_by_one(self, wanted: Sequence[int]) -> Iterator[Round]:
        """Yields a round for each expert, in the order given."""
        self._look_up(wanted)
        for expert in wanted:
            yield self._round([expert])

    def _look_up(self, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns experts that lie on the device, which are now the most recently used ones, and those that do not."""
        present = [expert for expert in wanted if expert in self.slots]
        for expert in present:
            self.slots[expert] = self.slots.pop(expert)
        return present, [expert for expert in wanted if expert not in self.slots]

    def _round(self, experts: Sequence[int]) -> Round:
        """Gives missing experts the slots of the least recently used ones."""
        loads = tuple(expert for expert in experts if expert not in self.slots)
        self.queries, self.hits = self.queries + len(experts), self.hits + len(experts) - len(loads)
        for expert in loads:
            self.slots[expert] = self.slots.pop(next(iter(self.slots)))
        return Round({expert: self.slots[expert] for expert in experts}, loads)

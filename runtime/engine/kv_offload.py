"""Which slots of host memory hold what was evicted from the KV pool, found again by hash. Bookkeeping only, no torch.

The pool saves a block here when it hands it out to a new owner, and a prefix match that ends in the pool goes on here.
Blocks move when the runner executes the next plan; until the scheduler knows that this plan is done, nothing it saves
is certain, and nothing it loads may be replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from runtime.core.step import BlockOffload


class HostTier:
    """A bounded map from block hashes to slots, the least recently used one replaced. It has no room without slots.

    An entry stays when it is loaded: the content did not change, so evicting the block again costs nothing. Blocks come
    from the pool ends of chains first, so the ends of chains are also replaced first.

    Args:
        num_slots: blocks that fit, with slots 0 to num_slots - 1.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_offloads = 0
        self.num_restores = 0
        self.clear()

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return len(self._slots)

    def save(self, block_hash: bytes, block_id: int) -> None:
        """Keeps the content of a block that is about to be overwritten, if a slot can be had for it."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
        elif (slot := self._take_slot()) is not None:
            self._slots[block_hash] = slot
            self._moves[slot] = block_id
            self._unsure.add(block_hash)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def find(self, hashes: Iterable[bytes]) -> list[bytes]:
        """The longest beginning of `hashes` that is here."""
        found: list[bytes] = []
        for block_hash in hashes:
            if block_hash not in self._slots:
                break
            found.append(block_hash)
        return found

    def load(self, hashes: Sequence[bytes]) -> list[int]:
        """Slots of known hashes. They are not replaced until the step that reads them is settled."""
        for block_hash in reversed(hashes):
            self._slots.move_to_end(block_hash)
        self._pinned.update(hashes)
        self.num_restores += len(hashes)
        return [self._slots[block_hash] for block_hash in hashes]

    def take_offloads(self) -> tuple[BlockOffload, ...]:
        """What the next plan must save. That plan is executed and then settled."""
        offloads = tuple(BlockOffload(block_id, slot) for slot, block_id in self._moves.items())
        self._moves.clear()
        self.num_offloads += len(offloads)
        return offloads

    def settle(self, *, done: bool) -> None:
        """The plan in flight is over. If it failed, what it should have saved may be anything and is forgotten."""
        if not done:
            self.forget(self._unsure.copy())
        self._unsure.clear()
        self._pinned.clear()

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Gives up entries whose content cannot be trusted. Unknown ones are fine."""
        for block_hash in hashes:
            slot = self._slots.pop(block_hash, None)
            if slot is not None:
                self._free.append(slot)
                self._moves.pop(slot, None)
                self._unsure.discard(block_hash)
                self._pinned.discard(block_hash)

    def clear(self) -> None:
        """Starts anew, empty."""
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(reversed(range(self.num_slots)))
        self._moves: dict[int, int] = {}  # slot -> block whose content the next plan saves there
        self._unsure: set[bytes] = set()
        self._pinned: set[bytes] = set()

    def check(self) -> None:
        """Verifies the invariants.

        Raises:
            RuntimeError: a slot is lost, has two owners, or something waits for an entry that is not there.
        """
        used = list(self._slots.values())
        if sorted(used + self._free) != list(range(self.num_slots)):
            raise RuntimeError(f"{len(used)} used and {len(self._free)} free host slots are not {self.num_slots}")
        if not self._moves.keys() <= set(used) or not self._unsure | self._pinned <= self._slots.keys():
            raise RuntimeError("a block moves to or from a host slot that nobody owns")

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((block_hash for block_hash in self._slots if block_hash not in self._pinned), None)
        if oldest is None:
            return None
        self._unsure.discard(oldest)
        slot = self._slots.pop(oldest)
        self._moves.pop(slot, None)
        return slot

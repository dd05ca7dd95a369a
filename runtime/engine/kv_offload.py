"""Bookkeeping of pages, or recurrent states, evicted to host memory, by hash. No torch.

The pool saves a block here when it reallocates it, and continues prefix matches here. The runner moves the data when it
executes the next plan. Until that plan is settled, blocks it loads must not be replaced. Until the plan after it is
settled, blocks it saves are provisional: a plan is settled before it is known whether it failed
(`runtime.engine.overlap`). Slots of recurrent states (`runtime.engine.state_pool`) are blocks in this sense, too.

Another engine may write here as well (`runtime.engine.transfer`): a slot is reserved for a hash, which can be found
once its content has arrived.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from runtime.core.step import BlockOffload


class KVOffload:
    """A bounded map from block hashes to slots of host memory, with least-recently-used replacement.

    A loaded entry stays: its content does not change, so evicting the block again costs nothing. The pool evicts ends
    of chains first, so these are also replaced first.

    Args:
        num_slots: number of slots, with ids 0 to num_slots - 1; 0 disables offloading.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_offloads = 0
        self.num_restores = 0
        self._reserved: dict[bytes, int] = {}  # slots that another engine writes
        self.clear()

    @property
    def num_used(self) -> int:
        """Number of slots that hold a block."""
        return len(self._slots)

    def save(self, block_hash: bytes, block_id: int) -> None:
        """Saves the content of a block that is about to be overwritten, if a slot is available."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
        elif (slot := self._take_slot()) is not None:
            self._slots[block_hash] = slot
            self._moves[slot] = block_id
            self._unsure[block_hash] = self._num_settled

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def find(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Returns the longest prefix of `hashes` that is stored."""
        found: list[bytes] = []
        for block_hash in hashes:
            if block_hash not in self._slots:
                break
            found.append(block_hash)
        return found

    def load(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the slots of stored hashes, which are pinned until the step that reads them is settled."""
        for block_hash in reversed(hashes):
            self._slots.move_to_end(block_hash)
        self._pinned.update(hashes)
        self.num_restores += len(hashes)
        return [self._slots[block_hash] for block_hash in hashes]

    def reserve(self, hashes: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """Reserves a slot for each hash that is neither stored nor reserved, as far as there are any; returns both."""
        reserved = []
        for block_hash in hashes:
            if block_hash in self._slots or block_hash in self._reserved:
                continue
            if (slot := self._take_slot()) is None:
                break
            self._reserved[block_hash] = slot
            reserved.append((block_hash, slot))
        return reserved

    def commit(self, hashes: Iterable[bytes]) -> None:
        """Stores reserved hashes, whose slots are written. They are not replaced until `release`."""
        for block_hash in hashes:
            slot = self._reserved.pop(block_hash)
            if block_hash in self._slots:  # computed here meanwhile, and evicted
                self._free.append(slot)
            else:
                self._slots[block_hash] = slot
            self._held[block_hash] += 1

    def release(self, hashes: Iterable[bytes]) -> None:
        """Allows the replacement of hashes that `commit` stored."""
        self._held -= Counter(hashes)

    def cancel(self, hashes: Iterable[bytes]) -> None:
        """Frees reserved slots, which are written no longer."""
        self._free += [self._reserved.pop(block_hash) for block_hash in hashes]

    def take_offloads(self) -> tuple[BlockOffload, ...]:
        """Returns the blocks that the next plan must offload. Call `settle` after that plan."""
        offloads = tuple(BlockOffload(block_id, slot) for slot, block_id in self._moves.items())
        self._moves.clear()
        self.num_offloads += len(offloads)
        return offloads

    def settle(self, *, done: bool) -> None:
        """Records the completion of the plan in flight. After a failure the entries that this plan and the one before
        it should have saved are removed."""
        if not done:
            self.forget(list(self._unsure))
        for name in [name for name, number in self._unsure.items() if number < self._num_settled]:
            del self._unsure[name]
        self._num_settled += 1
        self._pinned.clear()

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Removes entries with unreliable content; unknown hashes are ignored."""
        for block_hash in hashes:
            slot = self._slots.pop(block_hash, None)
            if slot is not None:
                self._free.append(slot)
                self._moves.pop(slot, None)
                self._unsure.pop(block_hash, None)
                self._pinned.discard(block_hash)
                del self._held[block_hash]

    def clear(self) -> None:
        """Removes all entries; reserved slots remain, because another engine may write to them."""
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        reserved = set(self._reserved.values())
        self._free = [slot for slot in reversed(range(self.num_slots)) if slot not in reserved]
        self._moves: dict[int, int] = {}  # slot -> block whose content the next plan saves there
        self._num_settled = 0
        self._unsure: dict[bytes, int] = {}  # entries of the last two plans -> number of plans settled before theirs
        self._pinned: set[bytes] = set()
        self._held: Counter[bytes] = Counter()  # entries that arrived for requests which have not started

    def check(self) -> None:
        """Verifies the invariants.

        Raises:
            RuntimeError: a slot is lost, has two owners, or a removed entry is still referenced.
        """
        used = [*self._slots.values(), *self._reserved.values()]
        if sorted(used + self._free) != list(range(self.num_slots)):
            raise RuntimeError(f"{len(used)} used and {len(self._free)} free host slots are not {self.num_slots}")
        known = self._unsure.keys() | self._pinned | self._held.keys()
        if not self._moves.keys() <= set(used) or not known <= self._slots.keys():
            raise RuntimeError("a block moves to or from a host slot without an owner")

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        kept = self._pinned | self._held.keys()
        oldest = next((block_hash for block_hash in self._slots if block_hash not in kept), None)
        if oldest is None:
            return None
        self._unsure.pop(oldest, None)
        slot = self._slots.pop(oldest)
        self._moves.pop(slot, None)
        return slot

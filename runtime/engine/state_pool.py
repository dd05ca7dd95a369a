"""Pool of slots for recurrent states: reference counts, lookup by prefix hash, eviction. No torch.

A slot is in exactly one of three states:

    in use   held by sequences that continue from its state, or write it in this step; may also be saved
    saved    not held, has a hash; findable until it is reallocated: states that a later state of the same text has
             replaced first, then the least recently used ones
    empty    not held, no hash; allocated before any saved slot

The hash of a saved state is that of the last block before it (`runtime.engine.block_pool`). A saved or shared state is
never overwritten: its readers write to other slots.

An evicted state is offloaded to host memory (`runtime.engine.kv_offload`) under the same hash. It is loaded back into a
slot of the sequence that continues from it, and its copy in host memory remains.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from runtime.engine.kv_offload import KVOffload

SHARED_USES = 2
"""Number of sequences that must continue from a state for it to count as a shared prefix."""


class StatePool:
    """Owner of all slots. Callers hold ids; each hold counts until it is released.

    Args:
        num_slots: slots with ids 0 to num_slots - 1.
        num_host_slots: slots of host memory for evicted states.
    """

    def __init__(self, num_slots: int, num_host_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.tier = KVOffload(num_host_slots)
        self.num_evictions = 0
        self.rebuild([])

    def rebuild(self, held: Iterable[int]) -> None:
        """Resets the pool to these holds, without saved states on the device and in host memory."""
        self._counts = Counter(held)
        self._empty = [slot for slot in reversed(range(self.num_slots)) if not self._counts[slot]]
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._uses: Counter[int] = Counter()
        # Slots without holds; least recently used first.
        self._saved: OrderedDict[int, None] = OrderedDict()
        self._replaced: OrderedDict[int, None] = OrderedDict()
        self.tier.clear()

    @property
    def num_free(self) -> int:
        """Number of slots that can be allocated, saved ones included."""
        return len(self._empty) + len(self._saved) + len(self._replaced)

    @property
    def num_findable(self) -> int:
        """Number of states that can be found by their hash."""
        return len(self._by_hash)

    def find(self, block_hash: bytes) -> int | None:
        """Returns the slot with this hash, or None. Takes no hold."""
        return self._by_hash.get(block_hash)

    def is_writable(self, slot: int) -> bool:
        """Returns whether the holder of a slot may overwrite it: no other sequence holds it, and it is not saved."""
        return self._counts[slot] == 1 and slot not in self._hashes

    def hold(self, slot: int) -> None:
        """Adds a hold."""
        self._counts[slot] += 1
        self._uses[slot] += slot in self._hashes
        self._saved.pop(slot, None)
        self._replaced.pop(slot, None)

    def allocate(self) -> int:
        """Allocates an empty slot, else the least recently used saved one.

        Raises:
            ValueError: no slot is free.
        """
        if not self.num_free:
            raise ValueError("no slot is free")
        if not self._empty:
            self.evict(next(iter(self._replaced or self._saved)))
        slot = self._empty.pop()
        self._counts[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        """Drops a hold. A saved slot without holds is then the most recently used one."""
        if self._counts[slot] < 1:
            raise ValueError(f"slot {slot} was released twice")
        self._counts[slot] -= 1
        if self._counts[slot]:
            return
        del self._counts[slot]
        if slot in self._hashes:
            self._saved[slot] = None
        else:
            self._empty.append(slot)

    def save(self, slot: int, block_hash: bytes, *, wanted: bool = False) -> None:
        """Saves the state of a held slot. If an equal state is saved, that one becomes the most recently used.

        Args:
            wanted: whether several texts continue from it.
        """
        known = self._by_hash.get(block_hash)
        if known is None:
            self._by_hash[block_hash], self._hashes[slot], self._uses[slot] = slot, block_hash, int(wanted)
        else:
            self.hold(known)
            self.release(known)

    def replace(self, block_hash: bytes, *, lasts: bool) -> None:
        """Marks a saved state for early eviction, unless several sequences continue from it.

        Args:
            lasts: if False, the state is dropped immediately unless a sequence has continued from it.
        """
        slot = self._by_hash.get(block_hash)
        if slot is None or slot not in self._saved or self._uses[slot] >= SHARED_USES:
            return
        if lasts or self._uses[slot]:
            del self._saved[slot]
            self._replaced[slot] = None
        else:
            self.forget([block_hash])

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Removes saved states; unknown hashes are ignored."""
        for block_hash in hashes:
            slot = self._by_hash.pop(block_hash, None)
            if slot is not None:
                del self._hashes[slot], self._uses[slot]
                if not self._counts[slot]:
                    self._saved.pop(slot, None)
                    self._replaced.pop(slot, None)
                    self._empty.append(slot)

    def evict(self, slot: int) -> None:
        """Makes a slot with at most one holder writable. Its state is offloaded to host memory by the next step, before
        that writes to the slot."""
        block_hash = self._hashes.get(slot)
        if block_hash is not None:
            self.num_evictions += 1
            self.tier.save(block_hash, slot)
            self.forget([block_hash])

    def check(self, held: Iterable[int]) -> None:
        """Verifies all invariants against the current holds.

        Raises:
            RuntimeError: an invariant is broken; the message names the slot.
        """
        counts = Counter(held)
        if counts != self._counts:
            wrong = next(slot for slot in counts | self._counts if counts[slot] != self._counts[slot])
            raise RuntimeError(f"slot {wrong} counts {self._counts[wrong]} holds, sequences have {counts[wrong]}")
        saved = self._saved | self._replaced
        if sorted([*counts, *self._empty, *self._saved, *self._replaced]) != list(range(self.num_slots)):
            raise RuntimeError("a slot is lost or on two lists")
        if self._by_hash != {block_hash: slot for slot, block_hash in self._hashes.items()}:
            raise RuntimeError("a hash leads to another slot")
        if not saved.keys() <= self._hashes.keys() or self._hashes.keys() & set(self._empty):
            raise RuntimeError("a slot without a hash is saved, or an empty one has a hash")
        self.tier.check()

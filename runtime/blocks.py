"""The pool of KV blocks: reference counts, prefix reuse by chained hashes, least-recently-used eviction. No torch.

A block is in exactly one of three states:

    in use   ref_count > 0; stands in that many block tables
    cached   ref_count = 0, has a hash; in the free list and still findable, until it is handed out again
    empty    ref_count = 0, no hash; in the free list, handed out before any cached block

Only full blocks have hashes, a hash covers everything before its block, and a block with a hash is never written again.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

HASH_BYTES = 16


@dataclass(slots=True)
class Block:
    """One block of the pool: how many tables hold it, and the hash of its content once it is full and computed."""

    ref_count: int = 0
    hash: bytes | None = None


def root_hash(namespace: str, cache_salt: str) -> bytes:
    """Start of a chain. Chains of different namespaces (KV formats) or salts (tenants) never meet."""
    return blake2b(repr((namespace, cache_salt)).encode(), digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes) -> None:
    """Appends to `hashes` what is missing so that every full block of `token_ids` has its chained hash."""
    previous = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        previous = blake2b(previous + tokens, digest_size=HASH_BYTES).digest()
        hashes.append(previous)


class BlockPool:
    """Owner of all KV blocks. Callers hold ids; every id they hold counts as one reference until they release it.

    Args:
        num_blocks: blocks with ids 0 to num_blocks - 1.
        block_size: tokens per block.
        prefix_caching: without it nothing is registered, so nothing is ever found.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._blocks = [Block() for _ in range(num_blocks)]
        self._by_hash: dict[bytes, int] = {}
        # Least recently used first. A dict, because a prefix hit takes blocks out of the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash."""
        return len(self._by_hash)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain. Takes no reference: `acquire` what you keep."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these stand in the free list, so that acquiring them makes `num_free` smaller."""
        return sum(block_id in self._free for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Takes one more reference to each block."""
        for block_id in block_ids:
            self._blocks[block_id].ref_count += 1
            self._free.pop(block_id, None)

    def allocate(self, count: int) -> list[int]:
        """Hands out blocks nobody holds, empty ones first, then the least recently used.

        Raises:
            ValueError: fewer than `count` are free; callers make room first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._blocks[block_id].ref_count = 1
            if self._blocks[block_id].hash is not None:
                self.num_evictions += 1
                self._drop_hash(block_id)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives one reference to each block back, tail first, so that the beginnings of prefixes live longest."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref_count < 1:
                raise ValueError(f"block {block_id} was released twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.hash is None:
                    self._free.move_to_end(block_id, last=False)

    def touch(self, block_id: int) -> None:
        """Makes a cached block the most recently used one."""
        if block_id in self._free:
            self._free.move_to_end(block_id)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Makes a full, computed block findable. Where an equal block is known already, this one stays anonymous."""
        if self.prefix_caching and block_hash not in self._by_hash and self._blocks[block_id].hash is None:
            self._by_hash[block_hash] = block_id
            self._blocks[block_id].hash = block_hash

    def forget(self, block_ids: Iterable[int]) -> None:
        """Makes blocks unfindable, because their content cannot be trusted or is about to change."""
        for block_id in block_ids:
            if self._blocks[block_id].hash is not None:
                self._drop_hash(block_id)
                if block_id in self._free:
                    self._free.move_to_end(block_id, last=False)

    def fork(self, block_ids: Sequence[int]) -> list[int]:
        """A second table over the same blocks. Before either writes into a shared block: `shared`, then a copy."""
        self.acquire(block_ids)
        return list(block_ids)

    def shared(self, block_id: int) -> bool:
        """Whether another table holds this block too, so that writing needs a copy."""
        return self._blocks[block_id].ref_count > 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verifies every invariant against all block tables there are.

        Raises:
            RuntimeError: an invariant is broken; the message names it and the block.
        """
        counts = Counter(block_id for table in tables for block_id in table)
        for block_id, block in enumerate(self._blocks):
            if block.ref_count != counts[block_id]:
                held = counts[block_id]
                raise RuntimeError(f"block {block_id} counts {block.ref_count} references, tables hold {held}")
            if (block.ref_count == 0) != (block_id in self._free):
                raise RuntimeError(f"block {block_id} with {block.ref_count} references is on the wrong list")
            if block.hash is not None and self._by_hash.get(block.hash) != block_id:
                raise RuntimeError(f"block {block_id} has a hash that does not lead to it")
        num_hashed = sum(block.hash is not None for block in self._blocks)
        if num_hashed != len(self._by_hash):
            raise RuntimeError(f"{len(self._by_hash)} hashes are known for {num_hashed} hashed blocks")

    def _drop_hash(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash = None

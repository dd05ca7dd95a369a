"""The pool of pages of the KV cache: reference counts, prefix reuse by chained hashes, LRU eviction. No torch.

A page, here called a block, is in exactly one of three states:

    in use   ref_count > 0; in ref_count block tables
    cached   ref_count = 0, has a hash; in the free list, and findable until it is allocated again
    empty    ref_count = 0, no hash; in the free list, allocated before any block in state `cached`

Only full blocks have hashes, a hash covers all tokens before its block, and a block with a hash is never written again.
Blocks with hashes form a forest: the parent of a block is the one before it in its chain. A block is findable only as
long as its parent is, so no memory is spent on unreachable blocks, and chains are evicted from their end. With an
attention window a block is useful without its predecessors; blocks are then found and evicted independently.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from runtime.engine.kv_offload import KVOffload

HASH_BYTES = 16


@dataclass(slots=True)
class Block:
    """One block of the pool.

    Attributes:
        ref_count: number of block tables that hold it.
        hash: hash of its content and of all preceding blocks, once it is full and computed.
        parent: preceding block in its chain; None for the first block, and without a hash.
    """

    ref_count: int = 0
    hash: bytes | None = None
    parent: int | None = None


def root_hash(namespace: str, cache_salt: str) -> bytes:
    """Returns the start of a hash chain. Chains of different namespaces (KV formats) or salts (tenants) are
    disjoint."""
    return blake2b(repr((namespace, cache_salt)).encode(), digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes) -> None:
    """Appends the missing chained hashes of the full blocks of `token_ids` to `hashes`."""
    previous = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        previous = blake2b(previous + tokens, digest_size=HASH_BYTES).digest()
        hashes.append(previous)


class BlockWatcher(Protocol):
    """Is told which blocks can be found by their hash, on the engine's thread."""

    def stored(
        self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int], cache_salt: str, adapter: str
    ) -> None:
        """A block can be found; `parent` is the hash of the one before it in its chain."""

    def removed(self, block_hash: bytes) -> None:
        """A block can be found no longer."""

    def cleared(self) -> None:
        """No block can be found."""


class BlockPool:
    """Owns all pages of the KV cache. Callers hold ids; each id counts as one reference until it is released.

    Args:
        num_blocks: blocks with ids 0 to num_blocks - 1.
        block_size: tokens per block.
        prefix_caching: whether to register full blocks for reuse by later sequences.
        num_host_blocks: slots of host memory for evicted blocks.
        chained: whether blocks are findable only as long as their parents are.

    Attributes:
        watcher: is told of changes of the prefix cache on the device, if there is one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        chained: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.chained = chained
        self.tier = KVOffload(num_host_blocks)
        self.num_evictions = 0
        self.watcher: BlockWatcher | None = None
        self.rebuild([])

    def rebuild(self, tables: Iterable[Sequence[int]]) -> None:
        """Resets the pool to these block tables, and clears the prefix cache on the device and in host memory."""
        counts = Counter(block_id for table in tables for block_id in table)
        self._blocks = [Block(counts[block_id]) for block_id in range(self.num_blocks)]
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[int, set[int]] = {}
        # Least recently used first. A dict, because a prefix hit takes blocks out of the middle.
        self._free = OrderedDict.fromkeys(block_id for block_id in range(self.num_blocks) if not counts[block_id])
        self.tier.clear()
        if self.watcher:
            self.watcher.cleared()

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks that can be found by their hash."""
        return len(self._by_hash)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find(self, block_hash: bytes) -> int | None:
        """Returns the block with this hash, or None. Takes no reference."""
        return self._by_hash.get(block_hash)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the pages of a chain's longest cached prefix. Takes no reference; call `acquire` on blocks to
        keep."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Returns the number of these blocks in the free list; acquiring them lowers `num_free`."""
        return sum(block_id in self._free for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block."""
        for block_id in block_ids:
            self._blocks[block_id].ref_count += 1
            self._free.pop(block_id, None)

    def allocate(self, count: int) -> list[int]:
        """Allocates free blocks: empty ones first, then the least recently used, from the ends of their chains.

        Raises:
            ValueError: fewer than `count` blocks are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        taken = []
        for _ in range(count):
            block_id = self._end_of_chain(next(iter(self._free)))
            self._evict(block_id)
            del self._free[block_id]
            self._blocks[block_id].ref_count = 1
            taken.append(block_id)
        return taken

    def evict(self, count: int) -> None:
        """Evicts up to `count` blocks in state `cached`, in the order of `allocate`."""
        for _ in range(count):
            cached = next((block_id for block_id in self._free if self._blocks[block_id].hash is not None), None)
            if cached is None:
                return
            self._evict(self._end_of_chain(cached))

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops a reference to each block, last block first, which keeps the first blocks of prefixes longest."""
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
        """Makes a block in state `cached` the most recently used one."""
        if block_id in self._free:
            self._free.move_to_end(block_id)

    def register(self, table: list[int], index: int, hashes: Sequence[bytes]) -> bool:
        """Registers a full, computed block of a table in the prefix cache, if its parent is registered. Returns whether
        it can be found since this call.

        If an equal block is cached already, the table gets that block instead: equal prefixes that were computed
        concurrently are stored once, and evicted together with their successors.

        Args:
            hashes: hash chain of the table's full blocks.
        """
        block_id, known = table[index], self._by_hash.get(hashes[index])
        parent = self._by_hash.get(hashes[index - 1]) if index else None
        if known is not None:
            table[index] = known
            self.acquire([known])
            self.release([block_id])
        elif (
            self.prefix_caching
            and self._blocks[block_id].hash is None
            and (parent is not None or index == 0 or not self.chained)
        ):
            self._by_hash[hashes[index]] = block_id
            self._blocks[block_id].hash, self._blocks[block_id].parent = hashes[index], parent
            if parent is not None:
                self._children.setdefault(parent, set()).add(block_id)
            return True
        return False

    def forget(self, block_ids: Iterable[int]) -> None:
        """Removes blocks and their descendants from the prefix cache, because their content is invalid or about to
        change.
        """
        for block_id in block_ids:
            self._drop_hash(block_id)

    def shared(self, block_id: int) -> bool:
        """Returns whether another table also holds this block; writing then needs a copy."""
        return self._blocks[block_id].ref_count > 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verifies all invariants against the current block tables.

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
            if block.parent is not None and (block.hash is None or self._blocks[block.parent].hash is None):
                raise RuntimeError(f"block {block_id} has the parent {block.parent}, and one of them has no hash")
        num_hashed = sum(block.hash is not None for block in self._blocks)
        if num_hashed != len(self._by_hash):
            raise RuntimeError(f"{len(self._by_hash)} hashes are known for {num_hashed} hashed blocks")
        families = {(parent, child) for parent, children in self._children.items() for child in children}
        if families != {(block.parent, i) for i, block in enumerate(self._blocks) if block.parent is not None}:
            raise RuntimeError("the children of some block do not have it as their parent")
        self.tier.check()

    def _end_of_chain(self, block_id: int) -> int:
        """Returns the last free block of the chain after a free block.

        Blocks are freed from the end of a table, so this takes few iterations. Descendants in use are ignored: they
        stay usable without this block.
        """
        free = self._free
        while (
            self.chained
            and (following := next((i for i in self._children.get(block_id, ()) if i in free), None)) is not None
        ):
            block_id = following
        return block_id

    def _evict(self, block_id: int) -> None:
        """Makes a free block empty. Its content is offloaded to host memory by the next step, before that writes to the
        block.
        """
        block_hash = self._blocks[block_id].hash
        if block_hash is not None:
            self.num_evictions += 1
            self.tier.save(block_hash, block_id)
            if not self.chained:
                for child in self._children.pop(block_id, ()):
                    self._blocks[child].parent = None
            self._drop_hash(block_id)

    def _drop_hash(self, block_id: int) -> None:
        """Removes a block and its descendants from the prefix cache. Those not in use become empty."""
        if self._blocks[block_id].hash is None:
            return
        unfindable = [block_id]
        while unfindable:
            block_id = unfindable.pop()
            block = self._blocks[block_id]
            unfindable += self._children.pop(block_id, ())
            if block.parent in self._children:
                self._children[block.parent].discard(block_id)
            if block.hash is not None:
                del self._by_hash[block.hash]
                if self.watcher:
                    self.watcher.removed(block.hash)
            block.hash = block.parent = None
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)

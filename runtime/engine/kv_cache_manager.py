"""Block tables of sequences: allocation, sharing, copy-on-write, and release of blocks. No torch."""

from __future__ import annotations

from collections import abc
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from runtime.core.adapter import Adapter
from runtime.core.attention_window import RELEASED, AttentionWindow, held_blocks
from runtime.core.config import RuntimeConfig
from runtime.core.request import Sequence
from runtime.core.step import BlockCopy, BlockRestore
from runtime.engine.block_pool import BlockPool, BlockWatcher, extend_hashes, root_hash
from runtime.engine.state_manager import StateManager


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Planned block table, before allocation.

    Attributes:
        table: ids of pages in the prefix cache; elsewhere `RELEASED`.
        missing: indices of entries that need a new block, ascending.
        saved: hashes of blocks in host memory that fill the first of the missing entries.
        source: page in the prefix cache to copy into the last new block, except its last token, which must be computed.
        num_computed_tokens: number of tokens with known keys and values afterwards.
    """

    table: list[int]
    missing: list[int]
    saved: list[bytes]
    source: int | None
    num_computed_tokens: int


def plan_table(
    pool: BlockPool, attention_window: AttentionWindow, hashes: abc.Sequence[bytes], num_tokens: int, span: int
) -> TablePlan:
    """Plans the table of a sequence of `num_tokens` tokens from pages in the prefix cache.

    The last token is always computed, because its logits are needed. If even its block is cached, the tokens before it
    are copied from that block.

    Args:
        hashes: chained hashes of the full blocks.
        span: maximum tokens of the sequence per step.
    """
    size = pool.block_size
    known = _known_blocks(pool, attention_window, hashes, num_tokens)
    num_computed = min(len(known) * size, num_tokens - 1)
    hidden = attention_window.evictable_blocks(num_computed, size)
    last = (num_tokens - 1) // size
    source = known[last] if len(known) > last else None
    kept = known[:last]
    table, missing = [], []
    for index in range(pool.blocks_for(attention_window.table_tokens(num_tokens, num_computed, span))):
        block_id = kept[index] if index < len(kept) else None
        if block_id is None and index not in hidden:
            missing.append(index)
        table.append(RELEASED if block_id is None or index in hidden else block_id)
    saved = [hashes[index] for index in missing if index < len(known) and known[index] is None]
    return TablePlan(table, missing, saved, source, num_computed)


def _known_blocks(
    pool: BlockPool, attention_window: AttentionWindow, hashes: abc.Sequence[bytes], num_tokens: int
) -> list[int | None]:
    """Returns the longest usable prefix: block ids, and None for blocks in host memory or outside the window."""
    if attention_window.window is None:
        found = pool.match(hashes)
        return [*found, *[None] * len(pool.tier.find(hashes[len(found) :]))]
    blocks = [pool.find(block_hash) for block_hash in hashes]
    known = [block is not None or name in pool.tier for block, name in zip(blocks, hashes, strict=True)]
    return blocks[: attention_window.usable_prefix(known, num_tokens, pool.block_size)]


@dataclass(frozen=True, slots=True)
class Start:
    """Starting point of a sequence.

    Attributes:
        num_matched_tokens: number of tokens with cached keys and values, with or without a saved recurrent state.
    """

    table: TablePlan
    num_matched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TakenBlocks:
    """Moves of blocks and of a recurrent state that precede the computation of a sequence."""

    copies: list[BlockCopy]
    restores: list[BlockRestore]
    state_restores: list[BlockRestore]


class KVCacheManager:
    """Manages the block tables of sequences for the scheduler. Single-threaded.

    Attributes:
        lent: blocks that are read for another engine, each with a reference.

    Args:
        pool: pages of the KV cache.
        config: configuration with the KV cache dtype and the maximum prompt tokens per step.
        attention_window: tokens that a token attends to; blocks outside of it are returned while a sequence runs.
        states: recurrent states of the same sequences, if the model has any: cached prefixes are used up to a saved
            state.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: RuntimeConfig,
        attention_window: AttentionWindow,
        states: StateManager | None = None,
    ) -> None:
        self.pool = pool
        self.states = states
        self.config = config
        self.attention_window = attention_window
        self.lent: list[int] = []

    def lend(self, block_hash: bytes) -> int | None:
        """Returns the block with this hash, which keeps its content until `take_back`; None if there is none."""
        block_id = self.pool.find(block_hash)
        if block_id is not None:
            self.pool.acquire([block_id])
            self.lent.append(block_id)
        return block_id

    def take_back(self, block_ids: abc.Iterable[int]) -> None:
        """Ends the loan of blocks."""
        for block_id in block_ids:
            self.lent.remove(block_id)
            self.pool.release([block_id])

    def most_held(self, num_tokens: int) -> int:
        """Returns the maximum number of blocks that a sequence of `num_tokens` tokens holds."""
        return self.attention_window.blocks_for(num_tokens, self.config.max_span_tokens, self.pool.block_size)

    def take(self, sequence: Sequence, num_running: int) -> TakenBlocks | None:
        """Allocates the blocks of a sequence that has none, reusing cached ones. Returns None without free blocks, or
        without a slot for its recurrent state.

        Args:
            num_running: number of running sequences; the same number of blocks stays free.
        """
        pool = self.pool
        start = self._find_start(sequence, num_running)
        if start is None:
            return None
        plan = start.table
        kept = held_blocks(plan.table)
        if len(plan.missing) + pool.count_free(kept) + num_running > pool.num_free:
            return None
        # Before the allocation, because its evictions may replace entries in host memory.
        slots = pool.tier.load(plan.saved)
        if plan.source is not None:
            pool.touch(plan.source)
        pool.acquire(kept)
        new = pool.allocate(len(plan.missing))
        for index, block_id in zip(plan.missing, new, strict=True):
            plan.table[index] = block_id
        sequence.block_ids = plan.table
        sequence.num_registered_blocks = min(plan.missing, default=len(plan.table))
        sequence.num_computed_tokens = plan.num_computed_tokens
        states = [] if self.states is None else self.states.start(sequence, start.num_matched_tokens)
        # The spare blocks and `touch` ensure that `new` does not contain the source.
        copies = [] if plan.source is None else _copy(plan.source, new[-1], pool.block_size - 1)
        return TakenBlocks(copies, list(map(BlockRestore, slots, new)), states)

    def _plan(self, sequence: Sequence, hashes: abc.Sequence[bytes]) -> TablePlan:
        span = self.config.max_span_tokens
        return plan_table(self.pool, self.attention_window, hashes, sequence.num_tokens, span)

    def _find_start(self, sequence: Sequence, num_running: int) -> Start | None:
        """Returns the longest cached prefix; for a model with recurrent states, the longest one with a saved state.
        None if there is no slot for the state of one more sequence."""
        whole = self._plan(sequence, hashes := self._findable_hashes(sequence))
        if self.states is None:
            return Start(whole)
        size, matched = self.pool.block_size, whole.num_computed_tokens
        for count in self.states.starts(hashes[: matched // size], sequence.num_tokens, num_running):
            plan = self._plan(sequence, hashes[:count])
            if plan.num_computed_tokens == count * size:
                return Start(plan, matched)
        return None

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Starts a fork on the blocks of `parent`; only the last prompt token remains to compute."""
        self.pool.acquire(held_blocks(parent.block_ids))
        child.block_ids = parent.block_ids.copy()
        child.num_computed_tokens = child.num_tokens - 1
        child.num_registered_blocks = child.num_computed_tokens // self.pool.block_size

    def lacks_slot(self, sequence: Sequence) -> bool:
        """Returns whether the next token needs a new block."""
        index = sequence.num_computed_tokens // self.pool.block_size
        return index == len(sequence.block_ids) or self.pool.shared(sequence.block_ids[index])

    def make_writable(self, sequence: Sequence) -> list[BlockCopy]:
        """Gives the next token an exclusive slot; a block must be free if it needs one."""
        table, size = sequence.block_ids, self.pool.block_size
        index, offset = divmod(sequence.num_computed_tokens, size)
        if index == len(table):
            table += self.pool.allocate(1)
            return []
        source = table[index]
        if not self.pool.shared(source):
            self.pool.forget([source])
            return []
        (table[index],) = self.pool.allocate(1)
        self.pool.release([source])
        return _copy(source, table[index], offset)

    def num_missing(self, sequence: Sequence) -> int:
        """Returns the number of blocks to allocate for the next span of a prompt."""
        span = self.config.max_span_tokens
        covered = self.attention_window.table_tokens(sequence.num_tokens, sequence.num_computed_tokens, span)
        return max(0, self.pool.blocks_for(covered) - len(sequence.block_ids))

    def extend(self, sequence: Sequence) -> None:
        """Allocates the blocks of a prompt's next span; they must be free."""
        sequence.block_ids += self.pool.allocate(self.num_missing(sequence))

    def fit_draft(self, sequence: Sequence, budget: int, num_spare: int) -> None:
        """Truncates the draft to the available room, and allocates its blocks.

        Args:
            budget: tokens left in the step.
            num_spare: blocks that must stay free.
        """
        # One more token follows the accepted ones, and `max_tokens` bounds both.
        room = min(budget, sequence.request.sampling.max_tokens - sequence.num_output_tokens - 1)
        num_blocks = len(sequence.block_ids) + max(0, self.pool.num_free - num_spare)
        slots = num_blocks * self.pool.block_size - sequence.num_tokens
        sequence.keep_drafts(max(0, min(room, slots)))
        missing = self.pool.blocks_for(sequence.num_tokens + len(sequence.draft_token_ids)) - len(sequence.block_ids)
        sequence.block_ids += self.pool.allocate(max(0, missing))

    def drop_draft(self, sequence: Sequence, num_known: int) -> None:
        """Releases the blocks of rejected draft tokens, after those of `num_known` tokens."""
        sequence.keep_drafts(0)
        num_blocks = self.pool.blocks_for(num_known)
        self.pool.release(sequence.block_ids[num_blocks:])
        del sequence.block_ids[num_blocks:]
        self.release_evictable(sequence)

    def register(self, sequence: Sequence, accepted: TokenIds[int]) -> None:
        """Adds full blocks of computed tokens to the prefix cache.

        Args:
            accepted: computed tokens that have not been appended to the sequence.
        """
        first, last = sequence.num_registered_blocks, sequence.num_computed_tokens // self.pool.block_size
        if not self.pool.prefix_caching or last <= first:
            return
        self._extend_hashes(sequence, accepted)
        for index in range(first, last):
            if sequence.block_ids[index] != RELEASED:
                is_new = self.pool.register(sequence.block_ids, index, sequence.block_hashes)
                if is_new and self.pool.watcher:
                    self._tell(self.pool.watcher, sequence, index, accepted)
        sequence.num_registered_blocks = last

    def _tell(self, watcher: BlockWatcher, sequence: Sequence, index: int, accepted: TokenIds[int]) -> None:
        """Tells a watcher of a new block."""
        hashes, options = sequence.block_hashes, sequence.request.options
        start, stop = index * self.pool.block_size, (index + 1) * self.pool.block_size
        num_known = len(sequence.token_ids)
        token_ids = [*sequence.token_ids[start:stop], *accepted[max(0, start - num_known) : max(0, stop - num_known)]]
        parent = hashes[index - 1] if index else None
        watcher.stored(hashes[index], parent, token_ids, options.cache_salt, options.adapter)

    def forget(self, sequence: Sequence) -> None:
        """Removes the blocks of a sequence from the prefix cache."""
        found = [self.pool.find(block_hash) for block_hash in sequence.block_hashes]
        self.pool.forget(block_id for block_id in found if block_id is not None)
        self.pool.tier.forget(sequence.block_hashes)
        if self.states is not None:
            self.states.forget(sequence)

    def release(self, sequence: Sequence) -> None:
        """Releases all blocks, and the slot of the recurrent state."""
        self.pool.release(held_blocks(sequence.block_ids))
        sequence.block_ids = []
        sequence.num_registered_blocks = 0
        sequence.num_computed_tokens = 0
        if self.states is not None:
            self.states.release(sequence)

    def release_evictable(self, sequence: Sequence) -> None:
        """Releases the blocks that no later token attends to, nor the last computed one of a decode: that may be
        computed again."""
        if self.attention_window.window is None:
            return
        table, is_decode = sequence.block_ids, sequence.num_tokens - sequence.num_computed_tokens <= 1
        position = sequence.num_computed_tokens - is_decode
        hidden = self.attention_window.evictable_blocks(position, self.pool.block_size)
        stop = start = hidden.stop
        while start > hidden.start and table[start - 1] != RELEASED:
            start -= 1
        self.pool.release(table[start:stop])
        table[start:stop] = [RELEASED] * (stop - start)

    def check(self, sequence: Sequence) -> None:
        """Verifies the table of a running sequence. Raises RuntimeError if it is inconsistent."""
        table, num_held = sequence.block_ids, len(held_blocks(sequence.block_ids))
        missing = self.attention_window.table_tokens(sequence.num_tokens, sequence.num_computed_tokens, 0)
        missing -= len(table) * self.pool.block_size
        if missing > 1 or sequence.num_computed_tokens >= sequence.num_tokens:
            raise RuntimeError(f"sequence {sequence.id} has tokens without blocks or nothing left to compute")
        hidden = self.attention_window.evictable_blocks(sequence.num_computed_tokens, self.pool.block_size)
        most_held = self.most_held(sequence.num_tokens)
        if RELEASED in table[: hidden.start] + table[hidden.stop :] or num_held > most_held:
            raise RuntimeError(
                f"sequence {sequence.id} holds {num_held} blocks, too many or not those inside its window"
            )

    def _findable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Returns hashes to look up; none if every token of the prompt must be computed."""
        if not self.pool.prefix_caching or sequence.wants_whole_prompt:
            return []
        self._extend_hashes(sequence)
        return sequence.block_hashes

    def _extend_hashes(self, sequence: Sequence, accepted: TokenIds[int] = ()) -> None:
        root = self.root(sequence.request.adapter, sequence.request.options.cache_salt)
        token_ids = [*sequence.token_ids, *accepted] if accepted else sequence.token_ids
        extend_hashes(sequence.block_hashes, token_ids, self.pool.block_size, root)

    def root(self, adapter: Adapter | None, cache_salt: str) -> bytes:
        """Returns the start of the hash chains of prompts with an adapter and a salt."""
        # Keys and values of a token depend on the tokens it attended to, and on the weights.
        weights = self.config.dtype if adapter is None else f"{self.config.dtype} with {adapter.digest}"
        return root_hash(f"{weights}, sees {self.attention_window}", cache_salt)


def _copy(source: int, target: int, num_tokens: int) -> list[BlockCopy]:
    return [BlockCopy(source, target, num_tokens)] if num_tokens else []

"""Plans each step: which tokens of which sequences are computed. There are no phases. No torch.

Each sequence closes the gap between its computed and its known tokens. The token budget of a step is spent in this
order: sequences one token behind (decodes), sequences in the middle of their prompt, waiting sequences, then draft
tokens. These rules make scheduling fair and free of deadlocks:

* `running` and `waiting` are sorted by `Sequence.order`: first come, first served, where a unit of priority is worth
  `PRIORITY_PLACES` places. No sequence overtakes the head of `waiting`.
* Blocks for all known tokens are allocated at admission, so only decodes can run out of blocks; then the last running
  sequence is preempted, never the first.
* With an attention window (`runtime.core.attention_window`), blocks outside it are returned to the pool, and at
  admission a long prompt gets only the blocks that it can hold at once. Its later chunks reuse the returned blocks;
  where other sequences hold those too, room is made as for decodes.
* Draft tokens (`Sequence.draft_token_ids`) get only tokens and blocks that nothing else needs in this step, and those
  blocks are returned after it. So speculation neither preempts nor delays a sequence.

Hence the first running sequence computes at least one token in every step. Without priorities and forks all running
sequences precede all waiting ones, and a sequence ends after at most the sum of `prompt + max_tokens` over itself and
those before it. With them the first of all sequences may have to wait, but only for those that run already: each
sequence ends after at most `(max_num_seqs + 1) * max_model_len` steps for itself and for each one before it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from compress.common.errors import RequestError
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow, held_blocks
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, Sequence, Status
from runtime.core.step import BlockCopy, BlockRestore, ScheduledSequence, StepPlan
from runtime.engine.block_pool import BlockPool
from runtime.engine.kv_cache_manager import KVCacheManager

PRIORITY_PLACES = 64
"""Later requests that may overtake a request, per unit of priority that they are ahead; bounds starvation."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_copies: int = 0


@dataclass(slots=True)
class _Step:
    """A plan under construction; `budget` is the number of tokens left."""

    budget: int
    entries: list[ScheduledSequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[BlockRestore] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.entries.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens))
        self.budget -= num_tokens


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Scheduler:
    """Plans steps. `blocks` manages the block tables of its sequences. Single-threaded.

    Args:
        pool: KV blocks.
        config: token budget, sequences per step, chunk size.
        max_model_len: longest prompt plus output in tokens.
        attention_window: tokens that a token attends to; blocks outside of it are returned while a sequence runs.
        shares_blocks: forks start on their parent's blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: RuntimeConfig,
        max_model_len: int,
        attention_window: AttentionWindow = FULL_ATTENTION,
        *,
        shares_blocks: bool = True,
    ) -> None:
        self.pool = pool
        self.config = config
        self.max_model_len = max_model_len
        self.blocks = KVCacheManager(pool, config, attention_window)
        self.shares_blocks = shares_blocks
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.stats = SchedulerStats()
        self._num_added = 0
        # Every running sequence gets a token per step, so more of them than the budget has tokens is never useful.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuses a request that could never finish; reads only constants, so any thread may call it.

        Raises:
            RequestError: the prompt is empty, or prompt and output exceed the context or the whole block pool.
        """
        if num_prompt_tokens < 1:
            raise RequestError("the prompt has no tokens", "Send at least one token")
        context = self.max_model_len
        room = context - num_prompt_tokens
        if room < min(max_tokens, 1):
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and the context ends at {context}",
                f"Shorten the prompt to at most {context - min(max_tokens, 1)} tokens",
            )
        both = f"{num_prompt_tokens} prompt tokens and max_tokens={max_tokens}"
        if max_tokens > room:
            raise RequestError(
                f"{both} exceed the context of {context}", f"Lower max_tokens to at most {room}, or shorten the prompt"
            )
        needed = self.blocks.most_held(num_prompt_tokens + max_tokens)
        if needed > self.pool.num_blocks:
            raise RequestError(
                f"{both} need {needed} KV blocks of {self.pool.block_size} and the pool has {self.pool.num_blocks}",
                "Lower max_tokens, shorten the prompt, or start the engine with more KV memory",
            )

    def add(self, request: Request) -> Sequence:
        """Queues a request.

        Raises:
            RequestError: it could never finish.
        """
        self.check_request(len(request.prompt_token_ids), request.sampling.max_tokens)
        place = self._num_added + request.options.priority * PRIORITY_PLACES
        sequence = Sequence(request, list(request.prompt_token_ids), order=(place, self._num_added, 0))
        self._num_added += 1
        insort(self.waiting, sequence, key=_order)
        return sequence

    def fork(self, parent: Sequence, request: Request, index: int) -> Sequence:
        """Adds a sequence with the prompt of `parent`, which is computed and has no output yet.

        If there is room, and blocks may be shared, it starts at once on the parent's blocks: it computes the last
        prompt token again for its logits, and writes to a copy of the last block. Otherwise it waits like any other.

        Args:
            index: 1 or more, unique among the forks of a parent; the place after it in the queue.
        """
        child = Sequence(request, list(request.prompt_token_ids), order=(*parent.order[:2], index))
        child.num_cached_tokens = parent.num_cached_tokens
        overtakes = bool(self.waiting) and self.waiting[0].order < child.order
        no_room = len(self.running) >= self._max_running or self.pool.num_free <= len(self.running)
        if overtakes or no_room or not self.shares_blocks:
            insort(self.waiting, child, key=_order)
            return child
        self.blocks.share(parent, child)
        child.status = Status.RUNNING
        insort(self.running, child, key=_order)
        return child

    def schedule(self) -> StepPlan:
        """Plans one step and allocates its blocks. Call `complete` or `fail` after the step."""
        step = _Step(self.config.max_num_batched_tokens)
        self._schedule_decodes(step)
        self._schedule_prefills(step)
        self._admit(step)
        self._schedule_drafts(step)
        self.stats.num_copies += len(step.copies)
        if not step.entries:
            return StepPlan(())
        return StepPlan(tuple(step.entries), tuple(step.copies), self.pool.tier.take_offloads(), tuple(step.restores))

    def decodes(self) -> list[Sequence]:
        """Returns the sequences to draft for: those in the middle of their output that the next step continues.

        Sequences at the end of their prompt are excluded: forks are made there, which share the parent's blocks.
            Returns
        none when running sequences need the whole budget, which leaves nothing for draft tokens.
        """
        chunk, budget = self.config.prefill_chunk, self.config.max_num_batched_tokens
        if sum(min(s.num_tokens - s.num_computed_tokens, chunk) for s in self.running) >= budget:
            return []
        return [s for s in self.running if s.num_tokens - s.num_computed_tokens == 1 and s.num_output_tokens]

    def complete(self, plan: StepPlan, accepted: Mapping[str, TokenIds[int]] | None = None) -> None:
        """Records that the plan's spans are computed. Call it before appending the sampled tokens.

        Full blocks become findable only here, so a failed step leaves nothing wrong in the cache. Only the accepted
        tokens of a draft count as computed; the blocks of the others are returned.

        Args:
            accepted: accepted draft tokens by sequence id.
        """
        self.pool.tier.settle(done=True)
        for entry in plan.entries:
            sequence = entry.sequence
            num_drafts = entry.num_draft_tokens
            kept = (accepted or {}).get(sequence.id, ()) if num_drafts else ()
            sequence.num_computed_tokens = entry.start + entry.num_tokens - num_drafts + len(kept)
            self.blocks.register(sequence, kept)
            if num_drafts:
                self.blocks.drop_draft(sequence)

    def fail(self) -> None:
        """Records that the plan failed. Call `finish` for each of its sequences."""
        self.pool.tier.settle(done=False)

    def preempt(self, sequence: Sequence) -> None:
        """Returns all blocks of a running sequence, which waits in its old place and recomputes its tokens."""
        self.stats.num_preemptions += 1
        self.stats.num_preempted_tokens += sequence.num_computed_tokens
        self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.keep_drafts(0)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Removes a sequence and frees its blocks. A second call does nothing.

        Args:
            trusted: False when its keys and values may be wrong; they are removed from the prefix cache.
        """
        if sequence.status is Status.FINISHED:
            return
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        if not trusted:
            self.blocks.forget(sequence)
        self.blocks.release(sequence)
        sequence.status = Status.FINISHED

    def heal(self) -> None:
        """Rebuilds the pool from the current block tables, with an empty prefix cache."""
        self.pool.rebuild(held_blocks(sequence.block_ids) for sequence in self.running + self.waiting)

    def check(self) -> None:
        """Verifies the invariants of queues, tables and pool.

        Raises:
            RuntimeError: one is broken.
        """
        self.pool.check(held_blocks(sequence.block_ids) for sequence in self.running + self.waiting)
        for queue, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if [s.order for s in queue] != sorted(s.order for s in queue) or any(s.status is not status for s in queue):
                raise RuntimeError(f"the {status} queue is out of order")
        for sequence in self.running:
            self.blocks.check(sequence)
        if any(sequence.block_ids or sequence.num_computed_tokens for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")

    def _schedule_decodes(self, step: _Step) -> None:
        # Oldest first, and the youngest is preempted, so no sequence preempted here has been planned yet. Prompts in
        # progress take their blocks in the same order, and are planned later.
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING:
                continue
            self.blocks.release_evictable(sequence)
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                self._extend(sequence)
            elif self._make_writable(sequence, step):
                step.add(sequence, 1)

    def _schedule_prefills(self, step: _Step) -> None:
        for sequence in self.running:
            if step.budget and sequence.num_tokens - sequence.num_computed_tokens > 1:
                step.add(sequence, self._chunk(sequence, step))

    def _admit(self, step: _Step) -> None:
        while self.waiting and step.budget and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            # About one block per running sequence stays free, so that admission causes no preemption in the next step.
            taken = self.blocks.take(sequence, len(self.running))
            if taken is None:
                break
            step.copies += taken.copies
            step.restores += taken.restores
            self._count_prefix(sequence)
            del self.waiting[0]
            sequence.status = Status.RUNNING
            insort(self.running, sequence, key=_order)
            step.add(sequence, self._chunk(sequence, step))

    def _schedule_drafts(self, step: _Step) -> None:
        # Last, so that drafts get only what nothing else needs.
        for entry in step.entries:
            if entry.sequence.draft_token_ids:
                # One block per running sequence stays free, so that no draft causes a preemption by a later decode.
                self.blocks.fit_draft(entry.sequence, step.budget, len(self.running))
                num_drafts = len(entry.sequence.draft_token_ids)
                entry.num_tokens += num_drafts
                step.budget -= num_drafts

    def _chunk(self, sequence: Sequence, step: _Step) -> int:
        rest = sequence.num_tokens - sequence.num_computed_tokens
        return min(rest, step.budget, self.config.prefill_chunk)

    def _make_writable(self, sequence: Sequence, step: _Step) -> bool:
        """Gives the next token a slot of its own. Returns False if the sequence itself had to be preempted."""
        while self.blocks.lacks_slot(sequence) and self.pool.num_free < 1:
            if not self._make_room(sequence):
                return False
        step.copies += self.blocks.make_writable(sequence)
        return True

    def _extend(self, sequence: Sequence) -> None:
        """Allocates the blocks of a prompt's next span, unless the sequence itself has to be preempted."""
        while self.blocks.num_missing(sequence) > self.pool.num_free:
            if not self._make_room(sequence):
                return
        self.blocks.extend(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempts the last running sequence. Returns False if that is `sequence` itself."""
        victim = self.running[-1]
        self.preempt(victim)
        return victim is not sequence

    def _count_prefix(self, sequence: Sequence) -> None:
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self.stats.num_prefix_queries += sequence.num_tokens
        self.stats.num_prefix_hits += sequence.num_computed_tokens

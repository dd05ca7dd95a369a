"""Scheduler: plans the tokens and sequences of each step, without separate prefill and decode phases. No torch.

Each sequence closes the gap between its computed and its known tokens. The token budget of a step is spent in this
order: sequences with one token left (decodes), sequences in the middle of their prompt, waiting sequences, then draft
tokens. With decodes, prompts get the time that these leave (`runtime.engine.step_costs`), but never nothing. These
rules make scheduling fair and free of deadlocks:

* `running` and `waiting` are sorted by `Sequence.order`: first come, first served, with priority units of
  `PRIORITY_PLACES` places. No sequence overtakes the head of `waiting`, unless a step has no tokens for the head.
* Several clients take turns (`runtime.engine.fairness`): the head of `waiting` is the first sequence of the client
  whose turn it is, and the last running sequence is the last one of the client with the most places. Order and priority
  apply among the sequences of one client.
* Blocks for all known tokens are allocated at admission, so only decodes can run out of blocks; then the last running
  sequence is preempted, never the first.
* With an attention window (`runtime.core.attention_window`), blocks outside it are returned to the pool, and at
  admission a long prompt gets only the blocks that it can hold at once. Its later chunks reuse the returned blocks;
  where other sequences hold those too, room is made as for decodes.
* Draft tokens (`Sequence.draft_token_ids`) get only tokens and blocks that nothing else needs in this step, and those
  blocks are returned after it. So speculation neither preempts nor delays a sequence.
* A step computes at most `max_loras` adapters. A sequence whose adapter has no place among those of the running ones
  waits, and so do those with an adapter after it; others pass it.
* With recurrent states (`runtime.engine.state_manager`), admission needs a slot for one more sequence, too. A sequence
  that runs never waits for a slot. It may compute accepted draft tokens again (`runtime.core.draft_states`), but
  none of the tokens before them.

Hence the first running sequence, and the first one of every other client, computes at least one token in every step.
With one client and without priorities and forks all running sequences precede all waiting ones, and a sequence ends
after at most the sum of `prompt + max_tokens` over itself and those before it. With them the first of all sequences may
have to wait, but only for those that run already: each sequence ends after at most
`(max_num_seqs + 1) * max_model_len` steps for itself and for each one before it.

With C clients the first of all sequences may also have to wait until its client holds no place, and then for one turn
of every other: each sequence ends after at most `((C + 1) * max_num_seqs + 1) * max_model_len` steps for itself and for
each one before it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, replace
from itertools import islice

from compress.common.errors import RequestError
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow, held_blocks
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, Sequence, Status
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.engine.block_pool import BlockPool
from runtime.engine.fairness import Clients, count_places, divide_cost, first_of_each, in_prompt, in_turns
from runtime.engine.kv_cache_manager import KVCacheManager
from runtime.engine.planned_step import PlannedStep, has_place, with_places
from runtime.engine.state_manager import StateManager
from runtime.engine.step_costs import StepCosts, prompt_seconds

PRIORITY_PLACES = 64
"""Number of later requests that may overtake a request, per unit of priority difference; bounds starvation."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_copies: int = 0


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Scheduler:
    """Scheduler of steps. `blocks` manages the block tables of its sequences. Single-threaded.

    Args:
        pool: pages of the KV cache.
        config: token budget, sequences per step, chunk size.
        max_model_len: longest prompt plus output in tokens.
        attention_window: tokens that a token attends to; blocks outside of it are returned while a sequence runs.
        states: recurrent states of sequences, if the model has any.
        shares_blocks: whether forks start on their parent's blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: RuntimeConfig,
        max_model_len: int,
        attention_window: AttentionWindow = FULL_ATTENTION,
        states: StateManager | None = None,
        *,
        shares_blocks: bool = True,
    ) -> None:
        self.pool = pool
        self.config = config
        self.max_model_len = max_model_len
        self.states = states
        self.blocks = KVCacheManager(pool, config, attention_window, states)
        # A fork computes the last prompt token again, and no recurrent state before that token is stored.
        self.shares_blocks = shares_blocks and states is None
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.clients = Clients()
        self.costs = StepCosts()
        self.stats = SchedulerStats()
        self._num_added = 0
        # Every running sequence gets a token per step, so more running sequences than budgeted tokens are never useful.
        self._max_running = min(config.max_num_seqs, config.step_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Rejects a request that could never finish. Reads only constants, so any thread may call it.

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
                f"{both} need {needed} KV pages of {self.pool.block_size} and the pool has {self.pool.num_blocks}",
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
        self.clients.join(sequence.client)
        insort(self.waiting, sequence, key=_order)
        return sequence

    def fork(self, parent: Sequence, request: Request, index: int) -> Sequence:
        """Adds a sequence with the prompt of `parent`, which is computed and has no output.

        If there is room, and blocks may be shared, it starts immediately on the parent's blocks: it computes the last
        prompt token again for its logits, and writes to a copy of the last block. Otherwise it waits like any other.
        `index` (1 or more, unique among the forks of a parent) is its offset after the parent in the queue.
        """
        child = Sequence(request, list(request.prompt_token_ids), order=(*parent.order[:2], index))
        child.num_cached_tokens = parent.num_cached_tokens
        self.clients.join(child.client)
        no_room = len(self.running) >= self._max_running or self.pool.num_free <= len(self.running)
        has_adapter = has_place(child, self.running, self.config.max_loras)
        if no_room or not self.shares_blocks or not has_adapter or self._overtakes(child):
            insort(self.waiting, child, key=_order)
            return child
        self.blocks.share(parent, child)
        self._run(child)
        return child

    def schedule(self) -> StepPlan:
        """Plans one step and allocates its blocks. Call `complete` or `fail` after the step."""
        step = PlannedStep(self.config.step_tokens)
        is_shared = self.clients.are_several
        if is_shared:
            self._claim_places(step)
        step.turns = in_turns(self.running) if is_shared else self.running.copy()
        self._schedule_decodes(step)
        self._limit_prompts(step)
        if is_shared:
            step.shares = self._share_cost(step)
            self._schedule_prompts(step)
            step.shares = None  # unused shares go to other clients
        self._schedule_prompts(step)
        if self.states is not None:
            self.states.plan(step.entries)
        self._schedule_drafts(step)
        if self.states is not None:
            self.states.add_saves()
        if not step.entries:
            return StepPlan(())
        copies = [*step.copies, *(copy for taken in step.taken.values() for copy in taken.copies)]
        restores = tuple(restore for taken in step.taken.values() for restore in taken.restores)
        self.stats.num_copies += len(copies)
        plan = StepPlan(tuple(step.entries), tuple(copies), self.pool.tier.take_offloads(), restores)
        if self.states is None:
            return plan
        states = tuple(restore for taken in step.taken.values() for restore in taken.state_restores)
        return replace(plan, state_offloads=self.states.pool.tier.take_offloads(), state_restores=states)

    def would_preempt(self) -> bool:
        """Returns whether `schedule` may preempt a sequence: for blocks, or for a client with fewer places."""
        sequences = [sequence for sequence in self.running if not sequence.is_held]
        for sequence in sequences:
            self.blocks.release_evictable(sequence)
        num_missing = sum(self.blocks.num_missing(s) or self.blocks.lacks_slot(s) for s in sequences)
        return num_missing > self.pool.num_free or bool(self._claims())

    def redraw(self, sequence: Sequence) -> None:
        """Marks the last known token of a sequence, which a complete step has computed, for recomputation. The
        recurrent state before it is overwritten, so a sequence with one is preempted."""
        sequence.needs_logits = True
        if self.states is not None:
            self.preempt(sequence)
            return
        sequence.num_computed_tokens = sequence.num_tokens - 1
        num_full_blocks = sequence.num_computed_tokens // self.pool.block_size
        sequence.num_registered_blocks = min(sequence.num_registered_blocks, num_full_blocks)
        self.blocks.drop_draft(sequence, sequence.num_tokens)

    def decodes(self) -> list[Sequence]:
        """Returns the sequences to draft for: those in decode that the next step continues.

        Sequences at the end of their prompt are excluded: forks are made there, which share the parent's blocks.
        Returns none when running sequences need the whole budget, which leaves nothing for draft tokens.
        """
        chunk, budget = self.config.max_span_tokens, self.config.step_tokens
        if sum(min(s.num_tokens - s.num_computed_tokens, chunk) for s in self.running) >= budget:
            return []
        decodes = filter(self._is_decode, self.running)
        # Drafts would make a slow grammar slower.
        return [s for s in decodes if not s.is_held and (s.constraint is None or not s.constraint.is_slow)]

    def _is_in_prompt(self, sequence: Sequence) -> bool:
        return sequence.num_tokens - sequence.num_computed_tokens > 1 and not self._is_decode(sequence)

    def _is_decode(self, sequence: Sequence) -> bool:
        """Returns whether a running sequence generates: at most accepted draft tokens are computed again."""
        most = 1 if self.states is None else min(1 + self.config.num_speculative_tokens, self.config.max_span_tokens)
        return sequence.num_tokens - sequence.num_computed_tokens <= most and sequence.num_output_tokens > 0

    def complete(self, plan: StepPlan, accepted: Mapping[str, TokenIds[int]] | None = None) -> None:
        """Records that the plan's spans are computed. Call it before appending the sampled tokens.

        Full blocks are registered only here, so a failed step leaves no invalid block in the prefix cache. Only the
        accepted tokens of a draft count as computed; the blocks of rejected ones are released.

        Args:
            accepted: accepted draft tokens by sequence id.
        """
        self._settle(plan, done=True)
        for entry in plan.entries:
            sequence = entry.sequence
            num_drafts = entry.num_draft_tokens
            kept = (accepted or {}).get(sequence.id, ()) if num_drafts else ()
            num_known = entry.start + entry.num_tokens - num_drafts + len(kept)
            sequence.num_computed_tokens = num_known if self.states is None else self.states.reached(entry, num_known)
            self.blocks.register(sequence, kept)
            if self.states is not None:
                self.states.complete(entry)
            if num_drafts:
                self.blocks.drop_draft(sequence, num_known)

    def fail(self) -> None:
        """Records that the plan failed. Call `finish` for each of its sequences."""
        self._settle(StepPlan(()), done=False)

    def _settle(self, completed: StepPlan, *, done: bool) -> None:
        self.pool.tier.settle(done=done)
        if self.states is not None:
            self.states.settle(completed.entries, done=done)

    def preempt(self, sequence: Sequence) -> None:
        """Releases all blocks of a running sequence, which returns to its place in the queue and recomputes its
        tokens."""
        self.stats.num_preemptions += 1
        self.stats.num_preempted_tokens += sequence.num_computed_tokens
        self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.keep_drafts(0)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Removes a sequence and frees its blocks. A second call has no effect.

        Args:
            trusted: False if its keys and values may be invalid; they are then removed from the prefix cache.
        """
        if sequence.status is Status.FINISHED:
            return
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        if not trusted:
            self.blocks.forget(sequence)
        self.blocks.release(sequence)
        self.clients.leave(sequence.client)
        sequence.status = Status.FINISHED

    def heal(self) -> None:
        """Rebuilds the pool from the current block tables, with an empty prefix cache."""
        self.pool.rebuild(self._tables())
        if self.states is not None:
            self.states.rebuild(self.running)

    def check(self) -> None:
        """Verifies the invariants of queues, tables and pool.

        Raises:
            RuntimeError: an invariant is violated.
        """
        self.pool.check(self._tables())
        for queue, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if [s.order for s in queue] != sorted(s.order for s in queue) or any(s.status is not status for s in queue):
                raise RuntimeError(f"the {status} queue is out of order")
        if self.states is not None:
            self.states.check(self.running)
        for sequence in self.running:
            self.blocks.check(sequence)
        if any(sequence.block_ids or sequence.num_computed_tokens for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        if {name: c.num_sequences for name, c in self.clients.by_name.items()} != count_places(
            self.running + self.waiting
        ):
            raise RuntimeError("the numbers of sequences of the clients are wrong")

    def _tables(self) -> list[TokenIds[int]]:
        """Returns all references to blocks."""
        return [self.blocks.lent, *(held_blocks(sequence.block_ids) for sequence in self.running + self.waiting)]

    def _key(self, places: Mapping[str, int]) -> Callable[[Sequence], tuple[int, int, tuple[int, int, int]]]:
        """Returns the sort key of waiting sequences, given the number of places per client."""
        return lambda s: (places[s.client], self.clients.by_name[s.client].turn, s.order)

    def _overtakes(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence precedes this one."""
        if not self.waiting or not self.clients.are_several:
            return bool(self.waiting) and self.waiting[0].order < sequence.order
        key = self._key(count_places(self.running))
        return min(map(key, first_of_each(self.waiting))) < key(sequence)

    def _head(self, step: PlannedStep) -> Sequence | None:
        """Returns the next waiting sequence that is not held, of a client with remaining tokens."""
        ready = with_places(self.waiting, self.running, self.config.max_loras)
        first = first_of_each(ready) if self.clients.are_several else islice(ready, 1)
        heads = [sequence for sequence in first if step.room(sequence)]
        return min(heads, key=self._key(count_places(self.running)), default=None)

    def _claim_places(self, step: PlannedStep) -> None:
        """Admits clients that hold at least two places fewer than another, before anything is planned."""
        for sequence in self._claims():
            self._claim_place(sequence, step)

    def _claims(self) -> list[Sequence]:
        """Returns the next sequence of each client that holds at least two places fewer than another."""
        if not self.clients.are_several or not self.waiting:
            return []
        places, busy = count_places(self.running), in_prompt(self.running)
        least = max(places.values(), default=0) - 2
        ready = with_places(self.waiting, self.running, self.config.max_loras)
        claims = [s for s in first_of_each(ready) if s.client not in busy and places[s.client] <= least]
        return sorted(claims, key=self._key(places))

    def _claim_place(self, sequence: Sequence, step: PlannedStep) -> None:
        while self.running and has_place(sequence, self.running, self.config.max_loras):
            places, last = count_places(self.running), in_turns(self.running)[-1]
            if places[last.client] < places[sequence.client] + 2:
                return
            if len(self.running) < self._max_running and self._enter(sequence, step):
                return
            self.preempt(last)

    def _limit_prompts(self, step: PlannedStep) -> None:
        """Limits the prompts of a step to the tokens, or with decodes to the time, that these leave."""
        step.prompt_budget = step.num_prompt_tokens = step.budget
        decodes = [s for s in self.running if self._is_decode(s)]
        if not decodes or self.config.max_itl_ms == 0 or not self.costs.is_known:
            return
        num_tokens = sum(max(1, s.num_tokens - s.num_computed_tokens) + len(s.draft_token_ids) for s in decodes)
        step.prompt_budget = prompt_seconds(self.costs, num_tokens, self.config.max_itl_ms)
        step.num_prompt_tokens = self.costs.max_prompt_tokens
        step.cost_of, step.decode_cost = self.costs.of_prompt_token, self.costs.seconds.decode_tokens

    def _share_cost(self, step: PlannedStep) -> dict[str, float]:
        """Returns the maximum cost of prompts of each client, given the decodes of the step."""
        prompts = sorted((step.cost_of(s), s.client) for s in self.running if self._is_in_prompt(s))
        least = {client: cost for cost, client in prompts}  # of several prompts, that with the highest cost
        asking = set(least).union(s.client for s in self.waiting if len(self.running) < self._max_running)
        places = count_places(entry.sequence for entry in step.entries) if len(asking) > 1 else {}
        decodes = {client: count * step.decode_cost for client, count in places.items()}
        return divide_cost(max(step.prompt_budget, sum(least.values())), decodes, least, asking)

    def _schedule_decodes(self, step: PlannedStep) -> None:
        # In turns, and the last one is preempted, so no sequence preempted here has been planned yet: it leaves
        # `step.turns` before the loop comes to it. Prompts in progress take their blocks in the same order, and are
        # planned later.
        for sequence in step.turns:
            if sequence.is_held:
                continue
            self.blocks.release_evictable(sequence)
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                self._extend(sequence, step)
            elif self._make_writable(sequence, step):
                step.add(sequence, 1)
        for sequence in step.turns:
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, step.budget)
            if num_tokens > 1 and self._is_decode(sequence):
                step.add(sequence, num_tokens)

    def _schedule_prompts(self, step: PlannedStep) -> None:
        """Plans prompts in progress, then waiting sequences."""
        for sequence in self.running:
            if self._is_in_prompt(sequence) and step.room(sequence):
                step.add_chunk(sequence, self.config.max_span_tokens)
        while step.budget and len(self.running) < self._max_running and (head := self._head(step)):
            if not self._enter(head, step):
                break
            step.add_chunk(head, self.config.max_span_tokens)

    def _enter(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Admits a waiting sequence and allocates its blocks. Returns False if it is held, or if blocks are missing."""
        # About one block per running sequence stays free, so that admission causes no preemption in the next step.
        taken = None if sequence.is_held else self.blocks.take(sequence, len(self.running))
        if taken is None:
            return False
        step.taken[sequence.id] = taken
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self.stats.num_prefix_queries += sequence.num_tokens
        self.stats.num_prefix_hits += sequence.num_computed_tokens
        self.waiting.remove(sequence)
        self._run(sequence)
        return True

    def _run(self, sequence: Sequence) -> None:
        self.clients.note_place(sequence.client)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)

    def _schedule_drafts(self, step: PlannedStep) -> None:
        # Planned last: drafts get only tokens and blocks that nothing else needs.
        drafted = [entry for entry in step.entries if entry.sequence.draft_token_ids]
        for place, entry in enumerate(drafted, 1):
            # One block per running sequence stays free, which prevents preemptions by later decodes because of drafts.
            self.blocks.fit_draft(entry.sequence, self._draft_room(entry, step), len(self.running))
            num_drafts = len(entry.sequence.draft_token_ids)
            entry.num_tokens += num_drafts
            step.budget -= num_drafts
            if self.states is not None:
                self.states.add_drafts(entry, len(drafted) - place)
        if self.states is not None:
            planned = {entry.sequence.id for entry in step.entries}
            for sequence in self.running:
                if sequence.id not in planned:
                    sequence.keep_drafts(0)  # no tokens remained for the preceding tokens

    def _draft_room(self, entry: ScheduledSequence, step: PlannedStep) -> int:
        """Returns the maximum draft tokens of an entry; 0 if its span ends before them, or without a free slot."""
        if self.states is None:
            return step.budget
        is_reached = entry.start + entry.num_tokens == entry.sequence.num_tokens
        return step.budget if is_reached and self.states.pool.num_free else 0

    def _make_writable(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Gives the next token an exclusive slot. Returns False if the sequence itself had to be preempted."""
        while self.blocks.lacks_slot(sequence) and self.pool.num_free < 1:
            if not self._make_room(sequence, step):
                return False
        step.copies += self.blocks.make_writable(sequence)
        return True

    def _extend(self, sequence: Sequence, step: PlannedStep) -> None:
        """Allocates the blocks of a prompt's next span, unless the sequence itself has to be preempted."""
        while self.blocks.num_missing(sequence) > self.pool.num_free:
            if not self._make_room(sequence, step):
                return
        self.blocks.extend(sequence)

    def _make_room(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Preempts the last running sequence. Returns False if that is `sequence` itself."""
        victim = step.turns.pop()
        step.taken.pop(victim.id, None)  # its blocks may be reused in this step
        self.preempt(victim)
        return victim is not sequence

"""Any sequence of arrivals, steps, aborts and failures, on any small pool, with and without room in host memory, with
any reach of the tokens, and also when chance preempts, evicts and aborts all the time: every request ends within a
computed bound, gets the tokens it would get alone, and releases everything it held."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from fake_runner import FakeDrafter, FakeRunner, expected_tokens
from fault_injection import FaultInjection
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from compress.common.errors import RequestError
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow
from runtime.core.config import RuntimeConfig
from runtime.core.draft_states import StateCosts
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine import Engine
from runtime.engine.output_processor import derive_seed
from runtime.engine.scheduler import PRIORITY_PLACES
from runtime.speculative.proposer import Speculator

MAX_MODEL_LEN = 30
END_TOKENS = frozenset({0, 1})
CLIENTS = ["", "", "b", "c"]


@dataclass
class Expected:
    """A live request: the tokens each of its answers must get, those it has, and the step it must end in at the latest.

    `order` is its place in the queue, `deadline` the end of its time.
    """

    order: tuple[int, int]
    bound: int
    deadline: int | None
    wanted: dict[int, list[int]]
    received: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Watched:
    """Watcher of the prefix cache: knows the hashes that can be found, and the tokens of every block so far."""

    findable: set[bytes] = field(default_factory=set)
    blocks: dict[bytes, tuple[bytes | None, list[int], str, str]] = field(default_factory=dict)

    def stored(
        self, block_hash: bytes, parent: bytes | None, token_ids: list[int], cache_salt: str, adapter: str
    ) -> None:
        assert block_hash not in self.findable
        self.findable.add(block_hash)
        told = (parent, token_ids, cache_salt, adapter)
        assert self.blocks.setdefault(block_hash, told) == told

    def removed(self, block_hash: bytes) -> None:
        self.findable.remove(block_hash)

    def cleared(self) -> None:
        self.findable.clear()

    def tokens(self, block_hash: bytes) -> list[int]:
        """The tokens of a prefix, as its chain has them."""
        parent, token_ids, *_ = self.blocks[block_hash]
        return [*(self.tokens(parent) if parent else []), *token_ids]


class EngineMachine(RuleBasedStateMachine):
    """The engine's clock counts steps; `total_steps` those of all machines."""

    total_steps: ClassVar[int] = 0

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 5),
        budget=st.integers(1, 20),
        num_sequences=st.integers(1, 6),
        chunk=st.integers(1, 8),
        prefix_caching=st.booleans(),
        plain=st.booleans(),
        num_host_blocks=st.sampled_from([0, 0, 1, 3, 20]),
        faults=st.sampled_from([None, None, 0, 1, 2]),
        attention_window=st.just(FULL_ATTENTION) | st.builds(AttentionWindow, st.integers(1, 12), st.integers(0, 5)),
        num_guesses=st.integers(0, 4),
        accuracy=st.sampled_from([0.3, 0.9]),
        num_state_slots=st.sampled_from([0, 0, 1, 2, 5, 12]),
        state_interval=st.integers(1, 12),
        num_host_states=st.sampled_from([0, 1, 3, 20]),
        token_bytes=st.sampled_from([0, 9]),
        overlaps=st.sampled_from([False, False, True]),
        undecided=st.sampled_from([0, 0, 0.1]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        num_sequences: int,
        chunk: int,
        prefix_caching: bool,
        plain: bool,
        num_host_blocks: int,
        faults: int | None,
        attention_window: AttentionWindow,
        num_guesses: int,
        accuracy: float,
        num_state_slots: int,
        state_interval: int,
        num_host_states: int,
        token_bytes: int,
        overlaps: bool,
        undecided: float,
    ) -> None:
        if overlaps:  # not with drafts
            num_guesses = 0
        config = RuntimeConfig(
            state_interval=state_interval,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=num_sequences,
            prefill_chunk=chunk,
            prefix_caching=prefix_caching,
        )
        self.runner = FakeRunner(
            num_blocks,
            block_size,
            MAX_MODEL_LEN,
            END_TOKENS,
            num_host_blocks,
            attention_window,
            num_state_slots=num_state_slots,
            num_host_states=num_host_states,
            state_costs=StateCosts(1, token_bytes),
        )
        self.runner.overlaps, self.runner.undecided = overlaps, undecided
        self.span = config.max_span_tokens
        self.num_steps = 0
        trouble = None if faults is None else FaultInjection(faults, preempt=0.2, evict=0.3, abort=0.02)
        drafter = FakeDrafter(num_guesses, accuracy, attention_window=attention_window)
        speculator = Speculator(drafter, num_guesses) if num_guesses else None
        self.engine = Engine(
            self.runner, None, config, speculator=speculator, clock=lambda: self.num_steps, before_step=trouble
        )
        self.watched = self.engine.scheduler.pool.watcher = Watched()
        self.faults = trouble is not None
        self.redraws = overlaps and undecided > 0 and num_state_slots > 0  # which preempts sequences
        self.plain = plain and trouble is None and not self.redraws
        self.longest_wait = ((len(set(CLIENTS)) + 1) * num_sequences + 1) * MAX_MODEL_LEN
        self.num_added = 0
        self.live: dict[str, Expected] = {}

    @rule(
        prefix=st.integers(0, 20),
        suffix=st.lists(st.integers(0, 2), max_size=4),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 1),
        salt=st.sampled_from(["", "", "tenant"]),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, -1, 1]),
        time_limit=st.sampled_from([None, None, None, 1, 5, 20]),
        client=st.sampled_from(CLIENTS),
    )
    def add(
        self,
        prefix: int,
        suffix: list[int],
        max_tokens: int,
        seed: int,
        salt: str,
        n: int,
        priority: int,
        time_limit: int | None,
        client: str,
    ) -> None:
        n, priority, client = (1, 0, "") if self.plain else (n, priority, client)
        prompt = [i % 3 for i in range(prefix)] + suffix
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed, n=n)
        options = RequestOptions(priority=priority, time_limit=time_limit, cache_salt=salt, client=client)
        try:
            request_id = self.engine.add_request(prompt, sampling, None, options)
        except RequestError:
            length, runner = len(prompt) + max_tokens, self.runner
            needed = runner.attention_window.blocks_for(length, self.span, runner.block_size)
            assert not prompt or length > MAX_MODEL_LEN or needed > runner.num_blocks
            return
        order = (self.num_added + priority * PRIORITY_PLACES, self.num_added)
        self.num_added += 1
        deadline = None if time_limit is None else self.num_steps + time_limit
        seeds = [seed, *(derive_seed(seed, index) for index in range(1, n))]
        attention_window = self.runner.attention_window
        wanted = {i: expected_tokens(prompt, max_tokens, s, END_TOKENS, attention_window) for i, s in enumerate(seeds)}
        bound = self.bound(order, n, len(prompt) + max_tokens)
        self.live[request_id] = Expected(order, bound, deadline, wanted, {index: [] for index in wanted})

    def bound(self, order: tuple[int, int], n: int, num_tokens: int) -> int:
        """The step in which a new request must have ended; moves the bounds of those that it overtakes.

        Plain requests: in every step the first one computes at least one token, and is not preempted. With several
        answers, priorities, faults and clients, the first of all sequences may wait until those that run have ended.
        """
        if self.plain:
            return max([self.num_steps, *(other.bound for other in self.live.values())]) + num_tokens
        for other in self.live.values():
            other.bound += n * self.longest_wait * (order < other.order)
        before = sum(len(other.wanted) for other in self.live.values() if other.order < order)
        return self.num_steps + (before + n) * self.longest_wait

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.abort(request_id)
        del self.live[request_id]

    @precondition(lambda self: self.live)
    @rule()
    def fail(self) -> None:
        self.runner.failure = RuntimeError("injected")
        self.step()
        self.runner.failure = None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        """Its logits are not finite from now on."""
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.runner.broken_ids.add(request_id)

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()
            assert self.engine.has_work == bool(self.live)
            assert all(self.num_steps <= expected.bound for expected in self.live.values())
            assert all(self.num_steps <= (e.deadline or self.num_steps) for e in self.live.values())
            pool = self.engine.scheduler.pool
            assert len(self.watched.findable) == pool.num_cached
            assert all(pool.find(block_hash) is not None for block_hash in self.watched.findable)
            for sequence in self.engine.scheduler.running:
                for index, block_hash in enumerate(sequence.block_hashes):
                    if block_hash in self.watched.findable and pool.chained:
                        assert self.watched.tokens(block_hash) == sequence.token_ids[: (index + 1) * pool.block_size]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.step()
            self.nothing_is_broken()
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.num_blocks
        if self.runner.num_state_slots:
            states = self.engine.scheduler.states
            states.plan([])  # the next plan frees slots of one whose sequences have all ended meanwhile
            assert states.pool.num_free == self.runner.num_state_slots
        requests = self.engine.output_processor
        for table in (requests._requests, requests._by_sequence, requests._times):
            assert not table

    def step(self) -> None:
        running = self.engine.scheduler.running
        first, preemptions = (running[0], running[0].num_preemptions) if running else (None, 0)
        deltas = self.engine.step()
        self.num_steps += 1
        EngineMachine.total_steps += 1
        assert self.redraws or first is None or first.num_preemptions == preemptions, "the first was preempted"
        for delta in deltas:
            self.take(delta)

    def take(self, delta: Delta) -> None:
        expected = self.live[delta.request_id]
        received, wanted = expected.received[delta.index], expected.wanted[delta.index]
        received += delta.token_ids
        assert received == wanted[: len(received)]
        if delta.finish_reason is None:
            return
        if delta.finish_reason is FinishReason.ABORT:
            assert self.faults
        elif delta.finish_reason is FinishReason.TIMEOUT:
            assert self.num_steps > expected.deadline
        elif delta.finish_reason is FinishReason.ERROR:
            assert "injected" in delta.error or delta.request_id in self.runner.broken_ids
        else:
            assert received == wanted
            assert delta.finish_reason is (FinishReason.STOP if wanted[-1] in END_TOKENS else FinishReason.LENGTH)
        del expected.received[delta.index]
        if not expected.received:
            del self.live[delta.request_id]


BOUNDED = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_everything_ends_and_nothing_leaks() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(BOUNDED, max_examples=30))


@pytest.mark.full
def test_everything_ends_and_nothing_leaks_in_eighty_runs() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(BOUNDED, max_examples=80))


@pytest.mark.slow
def test_everything_ends_and_nothing_leaks_in_a_hundred_thousand_steps() -> None:
    EngineMachine.total_steps = 0
    run_state_machine_as_test(EngineMachine, settings=settings(BOUNDED, max_examples=500, stateful_step_count=200))
    assert EngineMachine.total_steps > 100_000

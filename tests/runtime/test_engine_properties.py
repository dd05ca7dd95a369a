"""Any sequence of arrivals, steps and aborts, on any small pool: every request ends within a computed bound, gets the
tokens it would get alone, and leaves nothing behind."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, expected_tokens
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

from compress.checkpoint.errors import RequestError
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.types import Delta, FinishReason, SamplingParams

MAX_MODEL_LEN = 30
END_TOKENS = frozenset({0, 1})


class EngineMachine(RuleBasedStateMachine):
    """`wanted`: tokens each live request must get. `bounds`: the step in which it must have ended at the latest."""

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 5),
        budget=st.integers(1, 20),
        num_sequences=st.integers(1, 6),
        chunk=st.integers(1, 8),
        prefix_caching=st.booleans(),
    )
    def start(
        self, num_blocks: int, block_size: int, budget: int, num_sequences: int, chunk: int, prefix_caching: bool
    ) -> None:
        config = RuntimeConfig(
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_sequences=num_sequences,
            prefill_chunk=chunk,
            prefix_caching=prefix_caching,
        )
        self.runner = FakeRunner(num_blocks, block_size, MAX_MODEL_LEN, END_TOKENS)
        self.engine = Engine(self.runner, None, config)
        self.num_steps = 0
        self.wanted: dict[str, list[int]] = {}
        self.received: dict[str, list[int]] = {}
        self.bounds: dict[str, int] = {}

    @rule(
        prefix=st.integers(0, 20),
        suffix=st.lists(st.integers(0, 2), max_size=4),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 1),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def add(self, prefix: int, suffix: list[int], max_tokens: int, seed: int, salt: str) -> None:
        prompt = [i % 3 for i in range(prefix)] + suffix
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
        try:
            request_id = self.engine.add_request(prompt, sampling, cache_salt=salt)
        except RequestError:
            total = len(prompt) + max_tokens
            room = self.runner.num_blocks * self.runner.block_size
            assert not prompt or total > min(MAX_MODEL_LEN, room)
            return
        self.wanted[request_id] = expected_tokens(prompt, max_tokens, seed, END_TOKENS)
        self.received[request_id] = []
        # In every step the oldest computes at least one token, and who is preempted starts again once at most while
        # being the oldest: each takes no more steps than it has tokens, after those before it.
        before = max([self.num_steps, *self.bounds.values()])
        self.bounds[request_id] = before + len(prompt) + max_tokens

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.wanted)))
        self.engine.abort(request_id)
        self.forget(request_id)

    @precondition(lambda self: self.wanted)
    @rule()
    def fail(self) -> None:
        self.runner.failure = RuntimeError("injected")
        for delta in self.engine.step():
            assert delta.finish_reason is FinishReason.ERROR
            self.forget(delta.request_id)
        self.num_steps += 1

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()
            assert self.engine.has_work == bool(self.wanted)
            assert all(self.num_steps <= bound for bound in self.bounds.values())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.step()
            self.nothing_is_broken()
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.num_blocks
        assert not self.engine._answers
        assert not self.engine._times

    def step(self) -> None:
        oldest = min((s.order for s in self.engine.scheduler.running), default=None)
        preemptions = {s.order: s.num_preemptions for s in self.engine.scheduler.running}
        deltas = self.engine.step()
        for sequence in self.engine.scheduler.waiting:
            if sequence.order == oldest:
                assert sequence.num_preemptions == preemptions[sequence.order], "the oldest was preempted"
        self.num_steps += 1
        for delta in deltas:
            self.take(delta)

    def take(self, delta: Delta) -> None:
        received, wanted = self.received[delta.request_id], self.wanted[delta.request_id]
        received += delta.token_ids
        assert received == wanted[: len(received)]
        if delta.finish_reason is not None:
            assert received == wanted
            assert delta.finish_reason is (FinishReason.STOP if wanted[-1] in END_TOKENS else FinishReason.LENGTH)
            self.forget(delta.request_id)

    def forget(self, request_id: str) -> None:
        for table in (self.wanted, self.received, self.bounds):
            del table[request_id]


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_everything_ends_and_nothing_leaks() -> None:
    run_machine(examples=60, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_ends_and_nothing_leaks_in_a_hundred_thousand_steps() -> None:
    run_machine(examples=500, steps=200)

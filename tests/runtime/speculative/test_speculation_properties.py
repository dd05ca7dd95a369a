"""Any drafter, right or wrong, on any small pool: the tokens are those without drafts, and every invariant holds."""

import random

import pytest
from engines import answer_all, drain
from fake_runner import VOCAB_SIZE, FakeDrafter, FakeRunner, FakeTreeDrafter, expected_tokens
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow
from runtime.core.config import RuntimeConfig
from runtime.core.request import FinishReason, SamplingParams, Sequence
from runtime.engine.engine import Engine
from runtime.engine.output_processor import derive_seed
from runtime.speculative.proposer import Speculator

MAX_MODEL_LEN = 64
END_TOKENS = frozenset({0, 1})
REQUEST = st.tuples(
    st.integers(0, 12),  # of a prefix that all share
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(1, 25),  # max_tokens
    st.integers(1, 3),  # answers
)


def make_engine(
    num_blocks: int,
    num_guesses: int,
    accuracy: float,
    attention_window: AttentionWindow = FULL_ATTENTION,
    drafter: type[FakeDrafter] = FakeDrafter,
    **options: object,
) -> tuple[Engine, FakeRunner]:
    config = RuntimeConfig(**options)
    runner = FakeRunner(num_blocks, config.block_size, MAX_MODEL_LEN, END_TOKENS, attention_window=attention_window)
    guesses = drafter(num_guesses, accuracy, attention_window=attention_window)
    speculator = Speculator(guesses, num_guesses) if num_guesses else None
    return Engine(runner, None, config, speculator=speculator, clock=lambda: 0.0), runner


class WrongDrafter(FakeDrafter):
    """Never right."""

    def propose(self, wishes: list[tuple[Sequence, int]]) -> None:
        super().propose(wishes)
        for sequence, _ in wishes:
            sequence.draft_token_ids = [(token + 1) % VOCAB_SIZE for token in sequence.draft_token_ids]


@examples(250)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    num_blocks=st.integers(12, 60),
    num_guesses=st.integers(0, 6),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    block_size=st.integers(1, 5),
    budget=st.integers(1, 24),
    chunk=st.integers(1, 8),
    prefix_caching=st.booleans(),
    window=st.sampled_from([None, None, 3, 7]),
    drafter=st.sampled_from([FakeDrafter, FakeTreeDrafter]),
)
def test_tokens_do_not_depend_on_drafts(
    requests, num_blocks, num_guesses, accuracy, block_size, budget, chunk, prefix_caching, window, drafter
) -> None:
    attention_window = FULL_ATTENTION if window is None else AttentionWindow(window=window)
    options = {"block_size": block_size, "max_num_batched_tokens": budget, "prefill_chunk": chunk}
    sizes = (num_blocks * 5 // block_size, num_guesses, accuracy, attention_window, drafter)
    engine, runner = make_engine(*sizes, prefix_caching=prefix_caching, **options)
    wanted, received, reasons = {}, {}, {}
    for number, (prefix, suffix, max_tokens, n) in enumerate(requests):
        prompt = [i % 3 for i in range(prefix)] + suffix
        name = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=number, n=n))
        for index, seed in enumerate([number, *(derive_seed(number, index) for index in range(1, n))]):
            wanted[name, index] = expected_tokens(prompt, max_tokens, seed, END_TOKENS, attention_window)
            received[name, index] = []
    for delta in (delta for deltas in drain(engine).values() for delta in deltas):
        received[delta.request_id, delta.index] += delta.token_ids
        reasons[delta.request_id, delta.index] = delta.finish_reason
    assert all(sum(plan.values()) <= budget for plan in runner.plans)
    assert received == wanted
    for key, tokens in wanted.items():
        assert reasons[key] is (FinishReason.STOP if tokens[-1] in END_TOKENS else FinishReason.LENGTH)
    metrics = engine.metrics
    assert metrics.spec_decode_num_accepted_tokens_total <= metrics.spec_decode_num_draft_tokens_total


def test_right_guesses_save_steps_and_are_counted() -> None:
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    steps = {}
    for num_guesses in (0, 4):
        engine, runner = make_engine(40, num_guesses, accuracy=1.0, block_size=4)
        if num_guesses:
            engine.speculator.drafter._chance.randint = lambda low, high: high
        answer_all(engine, [("a", [5, 6, 7], params)])
        steps[num_guesses] = len(runner.plans)
    assert steps[0] == 40
    assert steps[4] <= 12
    metrics = engine.metrics
    assert metrics.spec_decode_num_accepted_tokens_total == metrics.spec_decode_num_draft_tokens_total == 40 - steps[4]


def test_a_tree_saves_steps_that_a_chain_does_not() -> None:
    params = SamplingParams(max_tokens=45, seed=3, ignore_eos=True)
    steps = {}
    for drafter in (FakeDrafter, FakeTreeDrafter):
        engine, runner = make_engine(40, 4, accuracy=0.6, drafter=drafter, block_size=4)
        answer_all(engine, [("a", [5, 6, 7], params)])
        steps[drafter] = len(runner.plans)
    assert steps[FakeTreeDrafter] < steps[FakeDrafter]


@pytest.mark.parametrize("drafter", [FakeDrafter, FakeTreeDrafter])
def test_blocks_of_accepted_tokens_are_found_by_the_next_request(drafter: type[FakeDrafter]) -> None:
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    cached = {}
    for num_guesses in (0, 5):
        engine, _ = make_engine(40, num_guesses, accuracy=0.8, drafter=drafter, block_size=4)
        tokens = answer_all(engine, [("a", [5, 6, 7], params)])["a", 0]
        engine.add_request([5, 6, 7, *tokens], params)
        cached[num_guesses] = engine.step()[0].num_cached_tokens
    assert cached[0] == cached[5] == 32


@pytest.mark.parametrize("num_blocks", [6, 7, 9])
def test_drafts_preempt_nobody(num_blocks: int) -> None:
    """Two sequences that just fit, or do not: guesses change nothing about who is preempted."""
    preemptions = {}
    for num_guesses in (0, 6):
        engine, _ = make_engine(num_blocks, num_guesses, accuracy=0.0, block_size=4, prefix_caching=False)
        for seed in range(2):
            engine.add_request([5] * 7, SamplingParams(max_tokens=9, seed=seed, ignore_eos=True))
        drain(engine)
        preemptions[num_guesses] = engine.scheduler.stats.num_preemptions
    assert preemptions[0] == preemptions[6]


@pytest.mark.parametrize("window", [None, 3, 12])
def test_wrong_guesses_delay_nobody(window: int | None) -> None:
    """Not one step more, and not one preemption: prompts get their tokens and blocks before guesses do."""
    attention_window = FULL_ATTENTION if window is None else AttentionWindow(window=window)
    chance = random.Random(window)
    for _ in range(40):
        options = {
            "block_size": chance.choice([1, 2, 4]),
            "max_num_batched_tokens": chance.choice([8, 16, 32]),
            "prefill_chunk": chance.choice([2, 4, 8]),
        }
        num_blocks = 40 * chance.choice([1, 2, 3]) // options["block_size"]
        requests = [([5] * chance.randint(1, 20), chance.randint(4, 20)) for _ in range(6)]
        cost = {}
        for num_guesses in (0, 6):
            sizes = (num_blocks, num_guesses, 1.0, attention_window, WrongDrafter)
            engine, runner = make_engine(*sizes, prefix_caching=False, **options)
            for seed, (prompt, max_tokens) in enumerate(requests):
                engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True))
                engine.step()
            drain(engine)
            cost[num_guesses] = (len(runner.plans), engine.scheduler.stats.num_preemptions)
        # With a window, blocks out of reach are freed slightly earlier after a draft token.
        assert cost[6] == cost[0] if window is None else cost[6] <= cost[0]


def test_a_drafter_that_raises_costs_speed_and_no_request() -> None:
    engine, _ = make_engine(40, 3, accuracy=1.0)

    def fail(wishes: object) -> None:
        raise RuntimeError("out of memory")

    engine.speculator.drafter.propose = fail
    request = ("a", [5, 6, 7], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    assert answer_all(engine, [request]) == {("a", 0): expected_tokens([5, 6, 7], 9, 1)}
    assert engine.speculator is None


def test_aborting_in_the_middle_of_guesses_frees_everything() -> None:
    engine, _ = make_engine(40, 5, accuracy=0.9, block_size=2)
    for number in range(4):
        engine.add_request([5, 6, 7, number], SamplingParams(max_tokens=40, seed=number, ignore_eos=True), str(number))
    for number in range(4):
        for _ in range(3):
            engine.step()
        engine.abort(str(number))
        engine.scheduler.check()
    assert engine.scheduler.pool.num_free == 40

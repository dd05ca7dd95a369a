"""An engine that submits the next step before it reads the last one says what a serial engine says."""

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import fields
from random import Random
from zlib import crc32

import pytest
from engines import drain, tokens_of
from fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens
from fault_injection import FaultInjection

from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.engine.metrics import Histogram

Answers = dict[tuple[str, int], dict[str, object]]
"""Everything that an answer consists of, by request and number."""


MAX_MODEL_LEN = 60


class Letters:
    """A text layer of one letter per token."""

    def detokenizer(self, prompt_token_ids=(), *, skip_special_tokens: bool = True) -> "Letters":
        return self

    def push(self, token_id: int) -> str:
        return "abcdefghij"[token_id % 10]

    def flush(self) -> str:
        return ""


class FailingRunner(FakeRunner):
    """Fails in one of `every` steps, which depends on nothing but what is computed; never if that is 0."""

    every = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        computed = repr([(entry.sequence.id, entry.start) for entry in plan.entries])
        if self.every and crc32(computed.encode()) % self.every == 0:
            self.failure = RuntimeError("injected")
        return super().execute(plan)


def make_engine(
    chance: Random,
    *,
    overlap: bool,
    end_token_ids: frozenset[int] = frozenset(),
    state_slots: TokenIds[int] = (1, 2, 5, 12),
    **options: object,
) -> Engine:
    """An engine of random sizes, with or without recurrent states and host memory; its clock counts calls."""
    bounded = AttentionWindow(chance.randint(1, 12), chance.randint(0, 5))
    window = chance.choice([FULL_ATTENTION, FULL_ATTENTION, bounded])
    config = RuntimeConfig(
        **{
            "block_size": chance.randint(1, 5),
            "max_num_batched_tokens": chance.choice([6, 20, 200]),
            "max_num_seqs": chance.choice([1, 2, 4, 30]),
            "prefill_chunk": chance.choice([3, 50]),
            "prefix_caching": chance.random() < 0.7,
            "state_interval": chance.randint(1, 12),
            "overlap": overlap,
        }
        | options
    )
    scarce = -(-MAX_MODEL_LEN // config.block_size) + chance.randint(0, 9)
    num_blocks = config.num_blocks or chance.choice([scarce, 300])
    runner = FailingRunner(
        num_blocks,
        config.block_size,
        MAX_MODEL_LEN,
        end_token_ids,
        chance.choice([0, 0, 3, 20]),
        window,
        num_state_slots=chance.choice([0, chance.choice(state_slots)]),
        num_host_states=chance.choice([0, 3]),
    )
    runner.overlaps = True
    return Engine(runner, Letters(), config)


def random_requests(
    chance: Random, clients: str = "  bc", **options: object
) -> list[tuple[list[int], SamplingParams, str, RequestOptions]]:
    """Prompts with equal beginnings, several answers, clients and priorities."""
    base = [chance.randrange(VOCAB_SIZE) for _ in range(30)]
    found = []
    for number in range(chance.randint(1, 12)):
        prompt = base[: chance.randint(0, 24)] + [chance.randrange(3) for _ in range(chance.randint(1, 3))]
        sampling = SamplingParams(
            **{
                "max_tokens": chance.choice([0, 1, 2, 5, 12, 30]),
                "seed": number,
                "n": chance.choice([1, 1, 1, 3]),
                "logprobs": chance.choice([None] * 6 + [2]),
                "presence_penalty": chance.choice([0, 0, 0, 0, 0, 1]),
            }
            | options
        )
        client, priority = chance.choice(clients), chance.choice([0, 0, 1])
        found.append((prompt, sampling, str(number), RequestOptions(client=client, priority=priority)))
    return found


def join(deltas: list[Delta]) -> Answers:
    """Whole answers; none goes on after its last delta."""
    found: Answers = {}
    for delta in deltas:
        answer = found.setdefault((delta.request_id, delta.index), {"text": "", "tokens": [], "logprobs": []})
        assert "finish_reason" not in answer
        answer["text"] += delta.text
        answer["tokens"] += delta.token_ids
        answer["logprobs"] += delta.logprobs
        if delta.finish_reason is not None:
            answer |= {"finish_reason": delta.finish_reason, "error": delta.error, "count": delta.num_output_tokens}
    return found


def numbers_of(engine: Engine) -> dict[str, object]:
    """All metrics but how steps were read, and the time of day."""
    engine.metrics.read_scheduler(engine.scheduler)
    found = {each.name: getattr(engine.metrics, each.name) for each in fields(engine.metrics)}
    del found["steps_by_overlap_total"], found["lora_requests_info"]
    return {name: value.counts if isinstance(value, Histogram) else value for name, value in found.items()}


def run_steps(engine: Engine) -> list[list[Delta]]:
    """Deltas of every call. Invariants hold after each, and everything is free in the end."""
    calls = []
    while engine.has_work:
        calls.append(engine.step())
        engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return calls


def compare_calls(seed: int) -> Counter[str]:
    """Requests of one client that arrive together and end by their length, with room for all: every call returns the
    same, and every number is."""
    room = {"max_num_seqs": 40, "max_num_batched_tokens": 40, "num_blocks": 900, "state_slots": [300]}
    engines = [make_engine(Random(seed), overlap=overlap, **room) for overlap in (False, True)]
    for engine in engines:
        engine._clock = engine.output_processor._clock = lambda engine=engine: engine.metrics.steps_total
        for prompt, sampling, name, options in random_requests(Random(seed), clients=" "):
            engine.add_request(prompt, sampling, name, options)
    serial, overlapped = engines
    expected, found = run_steps(serial), run_steps(overlapped)
    assert found == expected
    assert numbers_of(overlapped) == numbers_of(serial)
    assert overlapped.runner.plans == serial.runner.plans
    assert not serial.metrics.steps_by_overlap_total
    return overlapped.metrics.steps_by_overlap_total


def compare_answers(seed: int) -> Counter[str]:
    """Requests come at any time and end by what they say, or are aborted after some tokens; tokens are drawn again."""
    answers, engines = [], []
    for overlap in (False, True):
        engine, chance = make_engine(Random(seed), overlap=overlap, end_token_ids=frozenset({0, 1})), Random(seed)
        engine.runner.undecided = chance.choice([0, 0.03])
        engine._before_step = chance.choice([None, FaultInjection(seed, preempt=0.1, evict=0.2)])
        answers.append(_answers(engine, chance))
        engines.append(engine)
    assert answers[0] == answers[1]
    ends = [engine.metrics.request_success_total for engine in engines]
    assert ends[0] == ends[1]
    assert engines[0].metrics.generation_tokens_total == engines[1].metrics.generation_tokens_total
    return engines[1].metrics.steps_by_overlap_total


def _answers(engine: Engine, chance: Random) -> Answers:
    requests = random_requests(chance, stop=chance.choice([(), ("ab",), ("c", "dea")]))
    single = [name for _, sampling, name, _ in requests if sampling.n == 1]
    aborted = {name: chance.randint(0, 9) for name in single if chance.random() < 0.3}
    arrivals = sorted(chance.randint(0, 40) for _ in requests)
    deltas: list[Delta] = []
    for call in range(10**4):
        for arrival, (prompt, sampling, name, options) in zip(arrivals, requests, strict=True):
            if arrival == call:
                engine.add_request(prompt, sampling, name, options)
        new = engine.step() if engine.has_work else []
        engine.scheduler.check()
        for delta in new:
            deltas.append(delta)
            if delta.num_output_tokens >= aborted.get(delta.request_id, 10**6):
                deltas += engine.abort(delta.request_id)
        if call >= 40 and not engine.has_work:
            assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
            return join(deltas)
    raise AssertionError("no end")


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 500), marks=pytest.mark.full)], ids=["few", "many"]
)
@pytest.mark.parametrize("compare", [compare_calls, compare_answers])
def test_answers_and_numbers_are_those_of_a_serial_engine(compare: Callable[[int], Counter[str]], seeds: range) -> None:
    reasons = sum(map(compare, seeds), Counter())
    assert reasons["overlapped"] > reasons.total() / 5
    assert reasons.keys() >= {"other answers begin", "every sequence ends"}


def small_engine(prefill_chunk: int = 256, **options: object) -> Engine:
    runner = FakeRunner(**options)
    runner.overlaps = True
    return Engine(runner, Letters(), RuntimeConfig(block_size=4, prefill_chunk=prefill_chunk))


def add(engine: Engine, *lengths: int, **sampling: object) -> list[str]:
    """Requests of some output lengths, whose prompts are computed."""
    names = [
        engine.add_request([number, 3, 4], SamplingParams(max_tokens=length, seed=0, **sampling))
        for number, length in enumerate(lengths)
    ]
    engine.step()
    return names


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, {}),
        ({"num_state_slots": 4}, {}),
        ({"num_state_slots": 4, "num_host_states": 2}, {"top_k": 40}),
        ({"num_host_blocks": 4}, {"top_p": 0.9}),
        ({"attention_window": AttentionWindow(3, 1)}, {}),
        ({}, {"logprobs": 2}),
        ({}, {"frequency_penalty": 1}),
        ({}, {"repetition_penalty": 1.5}),
    ],
)
def test_each_step_is_submitted_before_the_one_before_is_read_and_none_in_vain(options: dict, sampling: dict) -> None:
    engine = small_engine(**options)
    add(engine, 5, 3, **sampling)
    seen = []
    while engine.has_work:
        engine.step()
        seen.append((len(engine.runner.plans), engine.metrics.steps_total))
    assert seen == [(3, 2), (4, 3), (5, 4), (5, 5)]


def test_what_was_computed_for_an_aborted_request_is_thrown_away() -> None:
    engine = small_engine()
    first, second = add(engine, 9, 9)
    engine.step()
    engine.abort(first)
    engine.scheduler.check()
    (delta,) = engine.step()
    assert (delta.request_id, delta.num_output_tokens) == (second, 3)
    engine.abort(second)
    assert not engine.has_work
    third = engine.add_request([0, 3, 4], SamplingParams(max_tokens=9, seed=0))
    assert tokens_of(drain(engine)[third]) == expected_tokens([0, 3, 4], 9)
    assert engine.metrics.steps_total == 12, "a step of aborted requests only is none"


def test_a_step_that_cannot_be_submitted_fails_after_the_one_before_is_read() -> None:
    engine = small_engine()
    add(engine, 9)
    engine.step()
    engine.runner.failure = RuntimeError("injected")
    (good,) = engine.step()
    assert good.num_output_tokens == 3
    (failed,) = engine.step()
    assert (failed.finish_reason, failed.num_output_tokens) == (FinishReason.ERROR, 3)
    assert "injected" in failed.error
    assert (engine.metrics.step_errors_total, engine.metrics.steps_total) == (1, 4)


def test_a_token_that_cannot_be_decided_late_is_drawn_again() -> None:
    engine = small_engine()
    engine.runner.undecided = 1.0
    names = add(engine, 20, 13)
    found = drain(engine)
    expected = [expected_tokens([0, 3, 4], 20), expected_tokens([1, 3, 4], 13)]
    assert [tokens_of(found[name]) for name in names] == expected
    assert engine.metrics.steps_by_overlap_total["a token was not decided"] > 10


@pytest.mark.parametrize(
    ("options", "sampling", "reason"),
    [
        ({"num_state_slots": 4}, {"top_p": 0.9}, "a token may not be decided"),
        ({}, {"min_tokens": 9}, "a grammar is followed"),
        ({}, {"top_n_sigma": 1.0}, "tokens are filtered by the host"),
    ],
)
def test_what_needs_the_last_token_first_says_why(options: dict, sampling: dict, reason: str) -> None:
    engine = small_engine(**options)
    (name,) = add(engine, 9, **sampling)
    assert len(tokens_of(drain(engine)[name])) == 8
    assert engine.metrics.steps_by_overlap_total == {reason: 9}
    assert f'runtime_steps_by_overlap_total{{overlap="{reason}"}} 9.0' in engine.render_metrics()


def test_prompts_continue_and_enter_before_the_step_before_is_read() -> None:
    """A chunk follows a chunk, a request that has come meanwhile enters, and both decode with tokens not yet read."""
    engine = small_engine(prefill_chunk=4)
    first = engine.add_request(list(range(10)), SamplingParams(max_tokens=4, seed=0))
    assert not engine.step()
    second = engine.add_request([7, 8], SamplingParams(max_tokens=4, seed=0))
    found = drain(engine)
    assert tokens_of(found[first]) == expected_tokens(list(range(10)), 4)
    assert tokens_of(found[second]) == expected_tokens([7, 8], 4)
    assert engine.runner.plans[:5] == [{first: 4}, {first: 4}, {first: 2, second: 2}, *[{first: 1, second: 1}] * 2]
    assert engine.metrics.steps_by_overlap_total == {"overlapped": 5, "every sequence ends": 1}


def test_what_shares_blocks_with_a_failed_step_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    """The next step is submitted by then, and has begun with a prefix that was never written."""
    caplog.set_level(logging.CRITICAL)
    engine = small_engine(prefill_chunk=8)
    prompt = list(range(22))
    failing = engine.add_request(prompt, SamplingParams(max_tokens=4, seed=0))
    engine.step()
    engine.runner.failure = RuntimeError("injected")
    engine.step()  # submits the last chunk, which fails
    good = engine.add_request([*prompt[:20], 3, 4, 5], SamplingParams(max_tokens=4, seed=0))
    found = drain(engine)
    assert found[failing][-1].finish_reason is FinishReason.ERROR
    assert tokens_of(found[good]) == expected_tokens([*prompt[:20], 3, 4, 5], 4)
    assert engine.runner.plans[3] == {failing: 1, good: 3}
    assert engine.metrics.step_errors_total == 1
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks

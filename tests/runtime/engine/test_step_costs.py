"""Steps with decodes take the time that `--max-itl` leaves, whatever prompts cost. On a model of costs with a clock of
its own: nothing here depends on the speed of the machine."""

import random
from collections import defaultdict
from math import ceil

import pytest
from fake_runner import VOCAB_SIZE, FakeDrafter, FakeRunner, expected_tokens
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.core.config import RuntimeConfig
from runtime.core.request import Pooling, RequestOptions, SamplingParams
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.engine.step_costs import DEFAULT_MAX_ITL_MS, LEAST_CHUNK, StepCosts, Work, prompt_seconds, step_work

CONTEXT = 2100
LONGEST_WAIT = DEFAULT_MAX_ITL_MS / 1000
SETTLED = 12
"""Steps with prompts after which a chunk has grown to its size."""
DEMO = Work(steps=0.0015, decode_tokens=0.0003, prompt_tokens=0.00014, context=0.00002, scored_tokens=0.00005)
"""Seconds, about those of the demo model on one core."""


class TimedRunner(FakeRunner):
    """Steps take as long as a linear model of costs says, times a factor around 1.

    Attributes:
        now: time in seconds, which only steps advance.
        steps: work and seconds of each step.
        seconds_of: seconds of the prompts of each client.
    """

    def __init__(self, costs: Work, noise: float = 0.0, num_state_slots: int = 0) -> None:
        blocks = 20 * ceil(CONTEXT / 16)
        super().__init__(blocks, 16, CONTEXT, num_state_slots=num_state_slots)
        self.costs, self.noise, self.now = costs, noise, 0.0
        self.steps: list[tuple[Work, float]] = []
        self.seconds_of: dict[str, float] = defaultdict(float)
        self._chance = random.Random(0)

    def _seconds(self, work: Work) -> float:
        return sum(amount * each for amount, each in zip(work, self.costs, strict=True))

    def execute(self, plan: StepPlan) -> StepOutput:
        work = step_work(plan.entries)
        seconds = self._seconds(work) * (1 + self.noise * self._chance.uniform(-1, 1))
        self.now += seconds
        self.steps.append((work, seconds))
        for entry in plan.entries:
            if entry.num_tokens - entry.num_draft_tokens > 1:
                cost = self._seconds(step_work([entry])._replace(steps=0))
                self.seconds_of[entry.sequence.client] += cost
        return super().execute(plan)


class Drafts:
    """Proposes for every decode, as the engine asks for it."""

    def __init__(self) -> None:
        self.drafter = FakeDrafter(4, accuracy=0.6)

    def propose(self, decodes: list) -> None:
        self.drafter.propose([(sequence, 4) for sequence in decodes])

    def note(self, plan: StepPlan, num_accepted: dict[str, int]) -> None:
        pass


def timed_engine(costs: Work = DEMO, noise: float = 0.0, num_state_slots: int = 0, **options: object) -> Engine:
    runner = TimedRunner(costs, noise, num_state_slots)
    config = RuntimeConfig(**({"max_itl_ms": None, "prefix_caching": False} | options))  # type: ignore[arg-type]
    speculator = Drafts() if num_state_slots else None
    engine = Engine(runner, None, config, speculator=speculator, clock=lambda: runner.now)
    engine.scheduler.check = lambda: None  # type: ignore[method-assign]  # slow with large pools
    return engine


def add(engine: Engine, client: str, num_tokens: int, max_tokens: int, *, scored: bool = False) -> str:
    number = engine._num_requests
    prompt = [(number * 7 + place * (number + 1)) % VOCAB_SIZE for place in range(num_tokens)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=5 if scored else None)
    return engine.add_request(prompt, sampling, options=RequestOptions(client=client))


def start_decodes(engine: Engine, count: int) -> list[str]:
    """Starts sequences of one client, and steps until all decode."""
    names = [add(engine, "decoding", 3, 1000) for _ in range(count)]
    for _ in range(12):
        engine.step()
    return names


def step_beside_prompts(engine: Engine, most: int) -> list[tuple[Work, float]]:
    """Steps until the prompts of the other client are computed; returns work and seconds of the steps with both."""
    first = len(engine.runner.steps)
    for _ in range(most):
        if all(s.client == "decoding" for s in engine.scheduler.running + engine.scheduler.waiting):
            break
        engine.step()
    return [(work, time) for work, time in engine.runner.steps[first:] if work.prompt_tokens and work.decode_tokens]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("at_once", [1, 64])
def test_a_step_beside_long_prompts_takes_no_longer_than_the_aim(at_once: int, scored: bool) -> None:
    engine = timed_engine(DEMO._replace(scored_tokens=0.0005), noise=0.1)
    start_decodes(engine, 1)
    for _ in range(at_once):
        add(engine, "prompts", 2000, 1, scored=scored)
    seconds = [time for _, time in step_beside_prompts(engine, 150)]
    assert max(seconds) <= LONGEST_WAIT * 1.1
    assert sorted(seconds[SETTLED:])[len(seconds[SETTLED:]) // 2] > LONGEST_WAIT / 2, "the time is used"


def test_without_an_aim_steps_are_as_large_as_the_budget() -> None:
    engine = timed_engine(max_itl_ms=0)
    start_decodes(engine, 1)
    add(engine, "prompts", 2000, 1)
    add(engine, "prompts", 2000, 1)
    assert step_beside_prompts(engine, 1)[0][0].prompt_tokens == engine.config.step_tokens - 1


def test_prompts_alone_are_computed_in_whole_steps() -> None:
    """No request waits for a next token, even where one token of a prompt is left."""
    engines = [timed_engine(max_itl_ms=aim) for aim in (None, 0)]
    for engine in engines:
        for number in range(40):
            add(engine, "prompts", 301 + number, 0)
        while engine.has_work:
            engine.step()
    assert engines[0].runner.plans == engines[1].runner.plans
    assert sum(engines[0].runner.plans[0].values()) == 512


COSTS = st.builds(
    Work,
    steps=st.floats(0.0005, 0.02),
    decode_tokens=st.floats(0.00002, 0.0005),
    prompt_tokens=st.floats(0.00002, 0.002),
    context=st.floats(0.0, 0.0001),
    scored_tokens=st.floats(0.0, 0.001),
)
PROMPTS = st.lists(st.tuples(st.integers(2, 600), st.booleans(), st.sampled_from("abc")), min_size=1, max_size=6)


@examples(25)
@given(costs=COSTS, prompts=PROMPTS, num_decodes=st.integers(1, 8), max_itl=st.sampled_from([None, 40.0, 200.0]))
def test_the_bound_holds_for_any_costs_and_mix(
    costs: Work, prompts: list, num_decodes: int, max_itl: float | None
) -> None:
    """Each step computes some of a prompt, and at most its first chunks take longer than the aim, by a half."""
    engine = timed_engine(costs, max_itl_ms=max_itl)
    start_decodes(engine, num_decodes)
    for num_tokens, scored, client in prompts:
        add(engine, client, num_tokens, 1, scored=scored)
    decode = costs.steps + num_decodes * costs.decode_tokens
    aim = max(LONGEST_WAIT, 5 * decode) if max_itl is None else max_itl / 1000
    least = decode + LEAST_CHUNK * (costs.prompt_tokens + costs.scored_tokens + 2 * costs.context)
    steps = step_beside_prompts(engine, 400)
    assert len(steps) <= sum(ceil(4 * num_tokens / LEAST_CHUNK) for num_tokens, _, _ in prompts)
    assert all(seconds <= 1.5 * max(aim, least) for _, seconds in steps)


def test_every_decode_gets_a_token_in_every_step() -> None:
    engine = timed_engine(noise=0.2)
    names = start_decodes(engine, 6)
    for _ in range(10):
        add(engine, "prompts", 1500, 1)
    for _ in range(60):
        got = [delta.request_id for delta in engine.step() if delta.token_ids]
        assert set(names) <= set(got)


def test_accepted_drafts_of_a_hybrid_are_computed_again_before_prompts() -> None:
    """Not after a prompt that came earlier and would take all of the time."""
    engine = timed_engine(num_state_slots=40, max_num_seqs=8)
    add(engine, "prompts", 2000, 1)
    engine.step()
    names = [add(engine, "decoding", 3, 60) for _ in range(2)]
    waits = dict.fromkeys(names, 0)
    begun: set[str] = set()
    for _ in range(25):
        got = {delta.request_id for delta in engine.step() if delta.token_ids}
        waits = {name: 0 if name in got or name not in begun else waits[name] + 1 for name in names}
        begun |= got
        assert max(waits.values()) == 0


def test_clients_share_seconds_not_tokens() -> None:
    """One client's tokens cost six times as much. What a chunk that still grows leaves goes to the other client."""
    engine = timed_engine(DEMO._replace(scored_tokens=5 * DEMO.prompt_tokens))
    start_decodes(engine, 1)
    for _ in range(8):
        add(engine, "scored", 2000, 1, scored=True)
        add(engine, "plain", 2000, 1)
    for _ in range(SETTLED):
        engine.step()
    engine.runner.seconds_of.clear()
    for _ in range(40):
        engine.step()
    scored, plain = (engine.runner.seconds_of[client] for client in ("scored", "plain"))
    assert plain / 2 < scored < 2 * plain


def test_answers_do_not_depend_on_the_aim() -> None:
    engine = timed_engine(noise=0.3)
    start_decodes(engine, 3)
    name = add(engine, "prompts", 1200, 20)
    (sequence,) = engine.scheduler.waiting
    tokens: list[int] = []
    while len(tokens) < 20:
        tokens += [token for delta in engine.step() if delta.request_id == name for token in delta.token_ids]
    assert tokens == expected_tokens(sequence.request.prompt_token_ids, 20, sequence.request.seed)


def test_embeddings_are_bounded_like_prompts() -> None:
    engine = timed_engine()
    start_decodes(engine, 1)
    for _ in range(10):
        options = RequestOptions(client="prompts", pooling=Pooling.MEAN)
        engine.add_request([1] * 2000, SamplingParams(max_tokens=0), options=options)
    assert max(seconds for _, seconds in step_beside_prompts(engine, 60)) <= LONGEST_WAIT * 1.1


@pytest.mark.parametrize("outlier", [10.0, 1000.0])
def test_one_slow_step_is_forgotten_soon(outlier: float) -> None:
    costs, work = StepCosts(), Work(1, 1, 250, 100)
    usual = sum(amount * each for amount, each in zip(work, DEMO, strict=True))
    for _ in range(40):
        costs.observe(Work(1, 1), DEMO.steps + DEMO.decode_tokens)
        costs.observe(work, usual)
    before = costs.predict(work)
    costs.observe(work, outlier * usual)
    assert costs.predict(work) <= 2.1 * before
    for _ in range(4):
        costs.observe(work, usual)
    assert costs.predict(work) <= 1.2 * before


def test_slow_prompts_do_not_make_decodes_seem_slower() -> None:
    """Otherwise four times a decode step would allow longer steps, and these slower decodes."""
    costs = StepCosts()
    for _ in range(20):
        costs.observe(Work(1, 1), 0.002)
    decode, allowed = costs.predict(Work(1, 1)), prompt_seconds(costs, 1, None)
    for _ in range(50):
        costs.observe(Work(1, 1, 200), 0.3)
    assert costs.predict(Work(1, 1)) == decode
    assert prompt_seconds(costs, 1, None) == allowed


@pytest.mark.parametrize("factor", [30.0, 300.0])
def test_a_slow_first_step_allows_no_longer_steps_before_decodes_are_measured(factor: float) -> None:
    """A client decodes in steps with prompts from the start: no step without prompts shows the cost of a decode."""
    engine = timed_engine(noise=0.1)
    for _ in range(64):
        add(engine, "prompts", 2000, 1)
    costs, engine.runner.costs = DEMO, Work(*(factor * each for each in DEMO))
    engine.step()
    engine.runner.costs = costs
    for _ in range(2 * SETTLED):
        engine.step()
    name = add(engine, "decoding", 3, 100)
    while all(delta.request_id != name for delta in engine.step()):
        pass
    assert max(seconds for _, seconds in step_beside_prompts(engine, 60)) <= LONGEST_WAIT * 1.1


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 512), st.floats(1e-6, 100.0)), min_size=1, max_size=60))
def test_coefficients_stay_positive(steps: list) -> None:
    costs = StepCosts()
    for num_decodes, num_tokens, seconds in steps:
        costs.observe(Work(1, num_decodes, num_tokens), seconds)
    assert all(0 < each < float("inf") for each in costs.seconds)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    costs = StepCosts()
    costs.observe(Work(1, 1), 0.0)
    assert costs == StepCosts()

"""One client delays another by no more than the bound in `runtime.engine.fairness`, whatever it sends. The bound is
computed from the configuration and counted in steps."""

from dataclasses import replace
from math import ceil

import pytest
from fake_runner import FakeRunner
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.core.config import RuntimeConfig
from runtime.core.request import Pooling, RequestOptions, SamplingParams, Sequence
from runtime.engine.engine import Engine
from runtime.engine.fairness import count_places, divide_cost
from runtime.engine.planned_step import ROUNDING
from runtime.engine.scheduler import Scheduler


def make_engine(config: RuntimeConfig, max_model_len: int, num_clients: int) -> Engine:
    """An engine whose pool is as large as the bound asks for, and not larger."""
    num_blocks = num_clients * ceil(max_model_len / config.block_size) + config.max_num_seqs
    return Engine(FakeRunner(num_blocks, config.block_size, max_model_len), None, config)


def prompt_steps(config: RuntimeConfig, num_clients: int, num_tokens: int) -> int:
    """Most steps from the arrival of a prompt to its first token."""
    share = (config.step_tokens - config.max_num_seqs) // num_clients
    return ceil(num_tokens / min(config.max_span_tokens, share))


def add(
    engine: Engine, client: str, num_tokens: int, *, embed: bool = False, priority: int = 0, **sampling: int
) -> str:
    number = engine._num_requests
    prompt = [number % 50, number // 50 % 50, *range(num_tokens)]  # no two begin alike
    options = RequestOptions(client=client, pooling=Pooling.MEAN if embed else Pooling.NONE, priority=priority)
    params = SamplingParams(**({"max_tokens": 0} if embed else sampling))
    return engine.add_request([token % 50 for token in prompt[:num_tokens]], params, options=options)


def step(engine: Engine, name: str) -> int:
    """Computes a step and returns the number of tokens that a request got."""
    deltas = engine.step()
    engine.scheduler.check()
    assert sum(engine.runner.plans[-1].values()) <= engine.config.step_tokens
    return sum(len(delta.token_ids) for delta in deltas if delta.request_id == name)


FLOODS = {
    "200 embeddings": (200, 2000, {"embed": True}),
    "128 answers": (1, 300, {"n": 128, "max_tokens": 48}),
    "200 long prompts": (200, 2000, {"max_tokens": 48}),
    "500 urgent requests": (500, 20, {"max_tokens": 400, "priority": -100}),
}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("num_steps", [0, 1, 9, 30])
def test_with_the_defaults_a_short_request_gets_its_first_token_in_one_step(flood: str, num_steps: int) -> None:
    """With the step in progress when it arrives this makes two."""
    config = RuntimeConfig()
    engine = make_engine(config, 2048, num_clients=2)
    count, num_tokens, fields = FLOODS[flood]
    engine.scheduler.check = lambda: None  # type: ignore[method-assign]  # slow with large pools
    for _ in range(count):
        add(engine, "greedy", num_tokens, **fields)
    for _ in range(num_steps):
        step(engine, "")
    name = add(engine, "modest", 200, max_tokens=6)
    assert prompt_steps(config, 2, 200) == 1
    assert [step(engine, name) for _ in range(6)] == [1] * 6


@st.composite
def configs(draw: st.DrawFn) -> tuple[RuntimeConfig, int]:
    """Configurations that the bound holds for, and the number of clients."""
    num_clients = draw(st.integers(2, 4))
    num_seqs = draw(st.integers(num_clients, 8))
    config = RuntimeConfig(
        block_size=draw(st.integers(1, 5)),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + num_clients + draw(st.integers(0, 24)),
        prefill_chunk=draw(st.integers(1, 12)),
        prefix_caching=draw(st.booleans()),
    )
    return config, num_clients


CONTEXT = 40
GREEDY = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, 28),
        "max_tokens": st.integers(0, 12),
        "embed": st.booleans(),
        "n": st.integers(1, 5),
        "priority": st.sampled_from([0, 0, -2]),
    }
)


@examples(160)
@given(
    configured=configs(),
    floods=st.lists(st.lists(GREEDY, max_size=3), min_size=1, max_size=30),
    arrival=st.integers(0, 30),
    num_tokens=st.integers(1, 28),
    max_tokens=st.integers(1, 12),
)
def test_no_flood_delays_another_client_beyond_the_bound(
    configured: tuple[RuntimeConfig, int], floods: list, arrival: int, num_tokens: int, max_tokens: int
) -> None:
    """The others go on sending while it is served."""
    config, num_clients = configured
    engine = make_engine(config, CONTEXT, num_clients)
    latest = prompt_steps(config, num_clients, num_tokens)
    name, got = "", []
    for number in range(arrival + latest + max_tokens - 1):
        for place, request in enumerate(floods[number % len(floods)]):
            add(engine, f"greedy {place % (num_clients - 1)}", **request)
        if number == arrival:
            name = add(engine, "modest", num_tokens, max_tokens=max_tokens)
        got.append(step(engine, name) if engine.has_work else 0)
    first = next(number for number, count in enumerate(got) if count) - arrival
    assert first < latest
    assert got[arrival + first : arrival + first + max_tokens] == [1] * max_tokens


class WatchedScheduler(Scheduler):
    """Records who was preempted, with the places that clients held at that time."""

    def preempt(self, sequence: Sequence) -> None:
        self.watched.append((sequence.client, count_places(self.running)))
        super().preempt(sequence)


@examples(160)
@given(configured=configs(), arrivals=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=40))
def test_only_clients_that_hold_more_than_others_lose_places(
    configured: tuple[RuntimeConfig, int], arrivals: list[list[int]]
) -> None:
    """And in one step not more of them than there are clients to let in, if blocks suffice."""
    config, num_clients = configured
    engine = make_engine(replace(config, block_size=CONTEXT), CONTEXT * config.max_num_seqs, num_clients)
    scheduler = engine.scheduler
    scheduler.__class__ = WatchedScheduler
    for clients in arrivals:
        for client in clients:
            add(engine, str(client % num_clients), 3, max_tokens=25)
        scheduler.watched = []
        if engine.has_work:
            step(engine, "")
        assert len(scheduler.watched) < num_clients
        for client, places in scheduler.watched:
            assert places[client] == max(places.values()) >= 2


@examples(400)
@given(
    spare=st.integers(0, 600),
    decodes=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 64)),
    prompts=st.sets(st.sampled_from("abcdef")),
    waiting=st.sets(st.sampled_from("abcdef")),
)
def test_tokens_are_divided_as_equally_as_decodes_allow(
    spare: int, decodes: dict[str, int], prompts: set[str], waiting: set[str]
) -> None:
    budget, asking = spare + len(prompts), prompts | waiting
    shares = divide_cost(budget, decodes, dict.fromkeys(prompts, 1), asking)
    assert shares.keys() == asking
    assert sum(shares.values()) <= budget + ROUNDING
    assert all(shares[name] >= 1 for name in prompts)
    total = {name: decodes.get(name, 0) + share for name, share in shares.items()}
    if asking:
        assert sum(shares.values()) == pytest.approx(budget), "nothing is left"
    for name in asking:
        is_floor = shares[name] == (name in prompts)
        assert is_floor or total[name] == pytest.approx(min(total.values())), (
            "no client gets more while another has less"
        )

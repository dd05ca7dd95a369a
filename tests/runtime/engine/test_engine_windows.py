"""Sliding windows and attention sinks in engine, scheduler and blocks: right tokens, few blocks, in any mixture."""

import pytest
from fake_runner import FakeRunner, expected_tokens
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from compress.common.errors import RequestError
from runtime.core.attention_window import AttentionWindow, held_blocks
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.engine.output_processor import derive_seed


def make_engine(window: AttentionWindow, num_blocks: int = 64, num_host_blocks: int = 0, **options: object) -> Engine:
    config = RuntimeConfig(**({"block_size": 4, "prefill_chunk": 8, "max_num_batched_tokens": 24} | options))
    sizes = (num_blocks, config.block_size, 256)
    return Engine(FakeRunner(*sizes, num_host_blocks=num_host_blocks, attention_window=window), None, config)


Tokens = dict[tuple[str, int], list[int]]
"""By request and answer."""


def run(engine: Engine, tokens: Tokens, max_steps: int = 10**6, max_held: int = 10**6) -> None:
    """Adds to `tokens`. After each step every sequence holds at most `max_held` blocks."""
    while engine.has_work and max_steps:
        max_steps -= 1
        for delta in engine.step():
            assert not delta.error
            tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        engine.scheduler.check()
        for sequence in engine.scheduler.running:
            assert len(held_blocks(sequence.block_ids)) <= max_held


@pytest.mark.parametrize(
    "attention_window", [AttentionWindow(10), AttentionWindow(10, 3), AttentionWindow(1), AttentionWindow(7, 4)]
)
@pytest.mark.parametrize("num_prompt_tokens", [3, 90])
def test_long_sequences_hold_the_window_and_a_chunk(attention_window: AttentionWindow, num_prompt_tokens: int) -> None:
    """12 blocks of 4 tokens, and sequences of 190."""
    engine = make_engine(attention_window, num_blocks=12)
    prompt = [7 * i % 50 for i in range(num_prompt_tokens)]
    engine.add_request(prompt, SamplingParams(max_tokens=100, seed=0), "a")
    found: Tokens = {}
    run(engine, found, max_held=attention_window.blocks_for(10**6, 8, 4))
    assert found == {("a", 0): expected_tokens(prompt, 100, attention_window=attention_window)}
    assert attention_window.blocks_for(10**6, 8, 4) <= 7


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_window_is_found_though_what_was_before_it_is_gone(num_host_blocks: int) -> None:
    """30 blocks' worth of text passed through a pool of 12; the last ones are enough to go on from."""
    engine = make_engine(AttentionWindow(10, 3), num_blocks=12, num_host_blocks=num_host_blocks)
    prompt = [5 * i % 50 for i in range(60)]
    tokens: Tokens = {}
    engine.add_request(prompt, SamplingParams(max_tokens=60, seed=0), "a")
    run(engine, tokens)
    longer = prompt + tokens["a", 0] + [1, 2, 3]
    engine.add_request(longer, SamplingParams(max_tokens=40, seed=1), "b")
    plans = len(engine.runner.plans)
    run(engine, tokens)
    assert tokens["b", 0] == expected_tokens(longer, 40, 1, attention_window=AttentionWindow(10, 3))
    assert engine.runner.plans[plans] == {"b": 123 - 116}


def test_a_preempted_stream_goes_on_from_its_window() -> None:
    engine = make_engine(AttentionWindow(10, 3), num_blocks=20)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=10, seed=0), "first")
    engine.add_request([4, 5, 6], SamplingParams(max_tokens=150, seed=0), "stream")
    tokens: Tokens = {}
    run(engine, tokens, max_steps=140)
    (stream,) = engine.scheduler.running
    assert stream.num_computed_tokens > 20 * 4
    engine.scheduler.preempt(stream)
    engine.step()
    assert engine.runner.plans[-1] == {"stream": 1 + (stream.num_computed_tokens - 1) % 4}


def test_what_the_window_cannot_hold_is_refused_with_the_numbers() -> None:
    engine = make_engine(AttentionWindow(40), num_blocks=11)
    with pytest.raises(RequestError, match=r"13 KV.*4.*11"):
        engine.add_request([1] * 60, SamplingParams(max_tokens=20))
    engine.add_request([1] * 30, SamplingParams(max_tokens=14))
    run(engine, {})
    assert engine.scheduler.pool.num_free == 11


@examples(150)
@given(
    attention_window=st.builds(AttentionWindow, st.integers(1, 14), st.integers(0, 6)),
    num_blocks=st.integers(6, 24),
    block_size=st.integers(1, 5),
    chunk=st.integers(1, 9),
    budget=st.integers(1, 24),
    prefix_caching=st.booleans(),
    requests=st.lists(
        st.tuples(
            st.integers(0, 30), st.lists(st.integers(0, 2), max_size=4), st.integers(1, 20), st.sampled_from([1, 1, 3])
        ),
        min_size=1,
        max_size=7,
    ),
    waves=st.integers(1, 3),
)
def test_any_mixture_gives_every_request_its_tokens(
    attention_window: AttentionWindow,
    num_blocks: int,
    block_size: int,
    chunk: int,
    budget: int,
    prefix_caching: bool,
    requests: list[tuple[int, list[int], int, int]],
    waves: int,
) -> None:
    options = {"block_size": block_size, "prefill_chunk": chunk, "max_num_batched_tokens": budget}
    engine = make_engine(attention_window, num_blocks, prefix_caching=prefix_caching, **options)
    wanted: Tokens = {}
    found: Tokens = {}
    for wave in range(waves):
        for number, (prefix, suffix, max_tokens, n) in enumerate(requests):
            prompt, name = [i % 3 for i in range(prefix)] + suffix, f"{wave}.{number}"
            try:
                engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=5, n=n), name)
            except RequestError:
                needed = attention_window.blocks_for(len(prompt) + max_tokens, min(chunk, budget), block_size)
                assert not prompt or needed > num_blocks
                continue
            for index in range(n):
                seed = derive_seed(5, index) if index else 5
                wanted[name, index] = expected_tokens(prompt, max_tokens, seed, attention_window=attention_window)
        run(engine, found, max_steps=9)
    run(engine, found)
    assert found == wanted
    assert engine.scheduler.pool.num_free == num_blocks

"""Prefill and decode in separate engines: the answers are those of one engine, and nothing is left over."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from lora_files import save_adapter
from separate_engines import alone, answers, collect, separate, until
from tiny_configs import DELTA_NET, SIZES
from tiny_models import save_tiny_model

from compress.common.errors import ToolkitError
from runtime.core.request import RequestOptions, SamplingParams
from runtime.engine.engine_loop import Run
from runtime.transfer.connector import CONNECTORS

PROMPTS = [[3 + (7 * index + 11 * place) % 900 for place in range(20 + 37 * index)] for index in range(8)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLINGS = [
    GREEDY,
    SamplingParams(max_tokens=12, seed=1, n=3),
    SamplingParams(max_tokens=12, seed=2, logprobs=2),
    SamplingParams(max_tokens=40, seed=3, stop=("a", "e")),
    SamplingParams(max_tokens=12, seed=4, repetition_penalty=1.3),
    SamplingParams(max_tokens=5, seed=5, prompt_logprobs=1),
    SamplingParams(max_tokens=0, seed=5),
]
REQUESTS = [(prompt, SAMPLINGS[index % len(SAMPLINGS)]) for index, prompt in enumerate(PROMPTS * 2)]
LONG = [(prompt, GREEDY) for prompt in PROMPTS[4:]]


def test_answers_are_those_of_one_engine() -> None:
    with alone() as one:
        wanted = answers(one, REQUESTS)
    with separate() as both:
        assert answers(both.decode, REQUESTS) == wanted
        both.check()
        assert set(both.results) == {"received"}
        assert both.results["received"] > 5
        sent, received = (engine.metrics.transferred_blocks_total for engine in both.engines)
        assert sent == received > 20


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache": "int8"},
        {"kv_cache": "int4", "kv_sinks": 4},
        pytest.param({"kv_cache": "fp8"}, marks=pytest.mark.full),
        pytest.param({"kv_cache": "k8v4"}, marks=pytest.mark.full),
        pytest.param({"attention_window": 64}, marks=pytest.mark.full),
        pytest.param({"dtype": "float32", "linear_backend": "auto"}, marks=pytest.mark.full),
        pytest.param({"dtype": "bfloat16", "kv_cache": "int4", "linear_backend": "auto"}, marks=pytest.mark.full),
        pytest.param({"speculative_model": "ngram"}, marks=pytest.mark.full),
    ],
    ids=lambda options: "-".join(f"{value}" for value in options.values()),
)
def test_pages_of_every_format_arrive_as_they_are(options: dict[str, Any]) -> None:
    with alone(**options) as one:
        wanted = answers(one, LONG, at_once=False)
    with separate(**options) as both:
        assert answers(both.decode, LONG, at_once=False) == wanted
        assert both.results == {"received": len(LONG)}
        both.check()


def test_recurrent_states_arrive(tmp_path: Path) -> None:
    """Three recurrent layers and one of attention."""
    options = SIZES | DELTA_NET
    path = save_tiny_model(tmp_path, "qwen3_5_text", **DELTA_NET)
    vocabulary = options["vocab_size"]
    requests = [([token % vocabulary for token in prompt[:90]], GREEDY) for prompt in PROMPTS[2:]]
    sizes = {"block_size": 4, "num_state_slots": 8, "max_model_len": 120}
    with alone(path, **sizes) as one:
        wanted = answers(one, requests)
    with separate(path, **sizes) as both:
        assert answers(both.decode, requests) == wanted
        assert both.results == {"received": len(requests)}
        assert both.decode.engine.scheduler.states.num_hits >= len(requests)
        computed = both.decode.engine.scheduler.stats
        assert computed.num_prefix_hits > computed.num_prefix_queries / 2
        both.check()


def test_nixl_moves_pages() -> None:
    if reason := CONNECTORS["nixl"].unsupported_reason():
        with pytest.raises(ToolkitError, match="not installed"), separate(connector="nixl"):
            pass
        pytest.skip(reason)
    with alone(kv_cache="int8") as one:
        wanted = answers(one, LONG)
    with separate(connector="nixl", kv_cache="int8") as both:
        assert answers(both.decode, LONG) == wanted
        assert both.results == {"received": len(LONG)}
        both.check()


def test_known_pages_are_neither_sent_nor_computed_again() -> None:
    start, ends = PROMPTS[5][:160], ([7] * 33, [8] * 33)
    with separate() as both:
        prefill, decode = (engine.metrics for engine in both.engines)
        answers(both.decode, [(start, GREEDY)])
        both.check()
        assert prefill.transferred_blocks_total == 9, "the last token's block is computed where it is needed"
        answers(both.decode, [([*start, *end], GREEDY) for end in ends], at_once=False)
        both.check()
        # The second engine computed the tenth block itself, and it is cached there.
        assert prefill.transferred_blocks_total == 9 + 2 * 2
        assert both.prefill.engine.scheduler.stats.num_prefix_hits >= 2 * 144
        before = both.results["received"]
        answers(both.decode, [([*start, *ends[0]], GREEDY)])
        assert both.results["received"] == before, "all is known"
        # What was evicted from the pages is still in host memory.
        both.decode.engine.scheduler.pool.evict(128)
        answers(both.decode, [([*start, *ends[0]], GREEDY)])
        assert both.results["received"] == before
        both.check()
        assert decode.transferred_blocks_total == prefill.transferred_blocks_total


def test_pages_known_to_the_first_engine_are_sent_without_a_step() -> None:
    with separate() as both:
        answers(both.prefill, [(PROMPTS[6], GREEDY)])
        num_steps = both.prefill.engine.metrics.steps_total
        answers(both.decode, [(PROMPTS[6], GREEDY)])
        assert both.results == {"received": 1}
        assert both.prefill.engine.metrics.steps_total == num_steps


def test_pages_are_sent_while_later_ones_are_computed() -> None:
    prompt, arrived = [5 + place % 700 for place in range(512)], []
    with separate() as both:
        store = both.receiver._store

        def note(prompt: Any, message: Any) -> None:
            arrived.append((len(message.hashes), both.prefill.engine.metrics.steps_total))
            store(prompt, message)

        both.receiver._store = note
        answers(both.decode, [(prompt, GREEDY)])
        both.check()
    assert sum(count for count, _ in arrived) == 31
    assert len(arrived) > 3
    assert arrived[0][1] < arrived[-1][1] == 8


def test_short_prompts_and_salts() -> None:
    with separate(local_tokens=64) as both:
        answers(both.decode, [(PROMPTS[1], GREEDY)])
        assert not both.results
        for salt in ("", "a", "a"):
            asyncio.run(collect(both.decode, PROMPTS[4], GREEDY, RequestOptions(cache_salt=salt)))
        assert both.results == {"received": 2}


def test_pages_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "a", {"model.layers.0.self_attn.v_proj": (128, 256)})
    named = {"lora_modules": [f"a={path}"]}
    adapted = RequestOptions(adapter="a")

    def ask(client: Any) -> list[list[int]]:
        async def all_of() -> list[list[int]]:
            options = (adapted, RequestOptions(), adapted)
            found = [await collect(client, PROMPTS[4], GREEDY, each) for each in options]
            return [[token for delta in deltas for token in delta.token_ids] for deltas in found]

        return asyncio.run(all_of())

    with alone(**named) as one:
        wanted = ask(one)
    assert wanted[0] != wanted[1]
    with separate(**named) as both:
        assert ask(both.decode) == wanted
        assert both.results == {"received": 2}
        both.check()


def test_a_request_that_vanishes_leaves_nothing() -> None:
    async def vanish(client: Any, num_groups: int) -> None:
        async with aclosing(client.generate(PROMPTS[7], SamplingParams(max_tokens=200, seed=0))) as groups:
            for _ in range(num_groups):
                await anext(groups)
            if not num_groups:
                task = asyncio.ensure_future(anext(groups))
                await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait([task])

    with separate() as both:
        for num_groups in (0, 0, 1, 3):
            asyncio.run(vanish(both.decode, num_groups))
            both.check()
            both.decode.engine.scheduler.pool.rebuild([])
            both.prefill.loop.put(Run(lambda: both.prefill.engine.scheduler.pool.evict(128)))


def test_few_slots_for_what_arrives() -> None:
    with alone() as one:
        wanted = answers(one, LONG)
    block = 16 * 2**10
    with separate(kv_offload_bytes=20 * block) as both:
        assert 0 < both.decode.engine.runner.num_host_blocks < 40
        assert answers(both.decode, LONG) == wanted
        both.check()


def test_few_blocks_where_prompts_are_computed() -> None:
    """Pages that are being copied may be all there are."""
    with alone() as one:
        wanted = answers(one, LONG)
    with separate(num_blocks=24, max_model_len=320) as both:
        assert answers(both.decode, LONG) == wanted
        both.check()


def test_engines_that_differ_are_not_connected(caplog: pytest.LogCaptureFixture) -> None:
    with separate() as both:
        peer = both.receiver.peers[0]
        peer.hello.shapes.popitem()
        peer.link.connection.shutdown(2)
        until(lambda: "different layouts" in caplog.text)
        assert peer.link is None
        assert answers(both.decode, [(PROMPTS[4], GREEDY)])
        assert not both.results
        assert caplog.text.count("different layouts") == 1


def test_recent_tokens_in_16_bits_are_refused() -> None:
    with pytest.raises(ToolkitError, match="outside of the pages"), separate(kv_cache="int8", kv_residual_length=16):
        pass

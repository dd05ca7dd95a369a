"""Several engines served as one: over HTTP the tokens, errors and metrics are those of one engine, by engine."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from engine_apart import HANGS, TroubledRunner, engine_process, new_engine
from prometheus_client.parser import text_string_to_metric_families
from servers import answer, is_idle, serving, serving_demo

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.adapters.store import HostAdapters
from runtime.core.config import Limits, RuntimeConfig
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine import Engine
from runtime.engine.engine_process import EngineProcess
from runtime.engine.engine_thread import EngineThread
from runtime.llm import load_engine
from runtime.routing.engine_group import EngineGroup
from runtime.routing.prefixes import MOST_AHEAD
from runtime.server.app import create_app

SECONDS = 30.0
BLOCK = 4
ENDLESS = SamplingParams(max_tokens=900, seed=0)
SHORT = SamplingParams(max_tokens=3, seed=0)


async def collect(
    group: EngineGroup, prompt: list[int], sampling: SamplingParams = SHORT, salt: str = ""
) -> list[Delta]:
    options = RequestOptions(cache_salt=salt)
    return [delta async for deltas in group.generate(prompt, sampling, options=options) for delta in deltas]


def grouped(test: Callable[[EngineGroup, list[Engine]], Coroutine[Any, Any, None]], most_blocks: int = 1000) -> None:
    """Runs a test with two engines in threads."""
    engines = [new_engine(TroubledRunner(2000, BLOCK, 1000)) for _ in range(2)]
    group = EngineGroup([EngineThread(engine, stall_seconds=1.0) for engine in engines], BLOCK, most_blocks)
    group.start()
    try:
        asyncio.run(asyncio.wait_for(test(group, engines), SECONDS))
    finally:
        group.stop(0.1)


def started(engines: list[Engine]) -> list[int]:
    return [int(engine.metrics.prompt_tokens_total) for engine in engines]


def test_a_prompt_goes_where_its_start_is_cached() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        prompts = [[number] * 12 for number in range(6)]
        for prompt in prompts:
            await collect(group, prompt)
        assert started(engines) == [36, 36]
        for prompt in reversed(prompts):
            deltas = await collect(group, [*prompt, 1, 2])
            assert deltas[0].num_cached_tokens == 12
        assert started(engines) == [36 + 3 * 14, 36 + 3 * 14]

    grouped(ask)


def test_a_salt_keeps_prompts_apart() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        for salt in ("", "alice"):
            await collect(group, [5] * 12, salt=salt)
        assert started(engines) == [12, 12]
        await collect(group, [5] * 12, salt="alice")
        assert started(engines) == [12, 24]

    grouped(ask)


def test_an_adapter_that_one_engine_refuses_is_loaded_by_none() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        folder = Path("adapter")
        first, second = (Mock(spec=HostAdapters) for _ in engines)
        second.load.side_effect = RequestError("no memory", "Unload another one")
        for engine, adapters in zip(engines, (first, second), strict=True):
            engine.adapters = adapters
        with pytest.raises(RequestError, match="no memory"):
            await group.change_adapters("tuned", folder)
        first.load.assert_called_once_with("tuned", folder)
        first.unload.assert_called_once_with("tuned")
        second.unload.assert_not_called()

    grouped(ask)


def test_a_prompt_leaves_an_engine_that_is_too_busy() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        await collect(group, [7] * 12)
        tasks = [asyncio.ensure_future(collect(group, [7] * 12, ENDLESS)) for _ in range(MOST_AHEAD + 3)]
        await asyncio.sleep(0)
        assert [engine.num_requests for engine in group.engines.values()] == [MOST_AHEAD + 1, 2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [engine.num_requests for engine in group.engines.values()] == [0, 0]

    grouped(ask)


def test_without_prefixes_requests_go_to_the_least_loaded_engine() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        for _ in range(6):
            await collect(group, [7] * 12)
        assert started(engines) == [36, 36]

    grouped(ask, most_blocks=0)


def test_metrics_have_the_label_of_their_engine() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        await collect(group, [7] * 12)
        text = await group.render_metrics("demo")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert len(families) == text.count("# TYPE ")
        for name in ("runtime_prompt_tokens", "vllm:prompt_tokens"):
            totals = {each.labels["engine"]: each.value for each in families[name].samples if "total" in each.name}
            assert totals == {"0": 12.0, "1": 0.0}
        alone = text_string_to_metric_families(engines[0].render_metrics("demo"))
        assert {family.name for family in alone} == families.keys()
        assert all(sample.labels["engine"] in "01" for family in families.values() for sample in family.samples)
        assert 'engine="0"' not in await group.render_metrics("demo", "1")

    grouped(ask)


def test_health_is_that_of_all() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        tasks = [asyncio.ensure_future(collect(group, [number], ENDLESS)) for number in range(4)]
        while group.check().num_running < 4:
            await asyncio.sleep(0.01)
        assert group.check().healthy
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = await collect(group, [HANGS], ENDLESS)
        assert found[-1].finish_reason is FinishReason.ERROR
        health = group.check()
        assert (health.healthy, health.has_ended) == (False, False)
        assert health.reason.startswith("engine ")
        assert health.seconds_since_progress > 0.5

    grouped(ask)


def test_a_refusal_is_that_of_the_engine() -> None:
    async def ask(group: EngineGroup, engines: list[Engine]) -> None:
        with pytest.raises(RequestError):
            await collect(group, [99])
        assert not any(engine.num_requests for engine in group.engines.values())

    grouped(ask)


def test_the_end_of_an_engine_is_that_of_the_group() -> None:
    async def ask(group: EngineGroup, victim: EngineProcess) -> None:
        group.start()
        tasks = [asyncio.ensure_future(collect(group, [number], ENDLESS)) for number in range(4)]
        while group.check().num_running < 4:
            await asyncio.sleep(0.01)
        victim.process.kill()
        while not (health := group.check()).has_ended:
            await asyncio.sleep(0.01)
        assert (health.healthy, health.num_running) == (False, 2)
        assert health.reason.startswith("engine 1")
        assert str(int(signal.SIGKILL)) in health.reason
        assert await asyncio.to_thread(group.stop, 10.0)
        reasons = [deltas[-1].finish_reason for deltas in await asyncio.gather(*tasks)]
        assert sorted(reasons) == [FinishReason.ABORT, FinishReason.ABORT, FinishReason.ERROR, FinishReason.ERROR]
        assert 'engine="1"' not in await group.render_metrics()

    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process()) for _ in range(2)]
        asyncio.run(asyncio.wait_for(ask(EngineGroup(engines, BLOCK, 100), engines[1]), SECONDS))


@contextmanager
def two_of_the_demo_model(most_blocks: int = 1000) -> Iterator[tuple[str, list[Engine]]]:
    """Two engines of the demo model as `serving_demo` has one: URL and engines."""
    config = RuntimeConfig(device="cpu", dtype="float64", linear_backend="reference", num_blocks=256)
    loaded = [load_engine(demo_model_path(), config) for _ in range(2)]
    engines = [engine for engine, _ in loaded]
    group = EngineGroup([EngineThread(engine) for engine in engines], config.block_size, most_blocks)
    limits = Limits(engines[0].runner.max_model_len, max_requests=32)
    with serving(create_app(group, loaded[0][1], "demo", limits)) as url:
        yield url, engines


def conversations(number: int, turns: int) -> list[list[str]]:
    """Prompts of several talks with one system prompt; each turn begins with the one before."""
    system = "The history of the city begins with a small settlement on the river. "
    return [
        [system + " ".join(f"{talk} asks {turn}, " * 8 for turn in range(last + 1)) for last in range(turns)]
        for talk in range(number)
    ]


def hold_talks(url: str, talks: list[list[str]]) -> list[list[Any]]:
    """Texts and cached tokens of all turns of talks that run at once."""

    def hold(talk: list[str]) -> list[Any]:
        body = {"model": "demo", "max_tokens": 8, "temperature": 0.7, "seed": 5}
        with httpx.Client(base_url=url, timeout=60) as api:
            found = [answer(api, "/v1/completions", prompt=prompt, **body) for prompt in talk]
        return [(each["choices"][0]["text"], each["usage"]["prompt_tokens_details"]["cached_tokens"]) for each in found]

    with ThreadPoolExecutor(len(talks)) as pool:
        return list(pool.map(hold, talks))


def test_tokens_over_http_are_those_of_one_engine() -> None:
    talks = conversations(4, 2)
    with serving_demo() as (url, _, _):
        expected = hold_talks(url, talks)
    with two_of_the_demo_model() as (url, engines):
        found = hold_talks(url, talks)
        metrics = httpx.get(f"{url}/metrics").text
        assert all(engine.metrics.prompt_tokens_total for engine in engines)
        assert all(map(is_idle, engines))
    assert [[text for text, _ in talk] for talk in found] == [[text for text, _ in talk] for talk in expected]
    assert 'runtime_num_requests_running{engine="1"} 0.0' in metrics
    for talk in found:
        assert all(cached for _, cached in talk[1:])


@pytest.mark.full
def test_more_is_found_in_caches_with_routing_than_without() -> None:
    talks, hits = conversations(5, 4), {}
    for most_blocks in (0, 1000):
        with two_of_the_demo_model(most_blocks) as (url, _):
            turns = [talk[turn : turn + 1] for turn in range(4) for talk in talks]
            hits[most_blocks] = sum(cached for turn in turns for _, cached in hold_talks(url, [turn])[0])
    assert hits[1000] > 1.3 * hits[0]

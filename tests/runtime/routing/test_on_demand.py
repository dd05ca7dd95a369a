"""Engines that are loaded on demand into a limited memory: real ones, in threads, with small runners."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from engine_apart import TroubledRunner, engine_process, new_engine

from compress.common.errors import RequestError, ToolkitError
from runtime.core.adapter import AdapterStore
from runtime.core.request import Delta, FinishReason, SamplingParams
from runtime.engine.engine_client import EngineClient
from runtime.engine.engine_thread import EngineThread
from runtime.routing import on_demand
from runtime.routing.on_demand import ModelMemory, OnDemandEngine

SECONDS = 30.0
SHORT = SamplingParams(max_tokens=3, seed=0)
ENDLESS = SamplingParams(max_tokens=900, seed=0)


@dataclass
class Models:
    """Models of 4 bytes each in a memory of 8.

    Attributes:
        loads: names in the order in which they were loaded.
        broken: names of models that cannot be loaded.
        adapters: adapters of each engine of `load_adapted`, in the order of loads.
        wrong: names of adapters that these refuse.
    """

    memory: ModelMemory = field(default_factory=lambda: ModelMemory(8))
    loads: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    engines: dict[str, OnDemandEngine] = field(default_factory=dict)
    adapters: list[Mock] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)

    def load_adapted(self, _: ExitStack) -> EngineClient:
        """Loads an engine with adapters, which `adapters` records."""

        def load(name: str, _: Path) -> None:
            if name in self.wrong:
                raise RequestError(f"no room for {name}", "Unload another one")

        engine = new_engine(TroubledRunner(2000, 4, 1000))
        engine.adapters = Mock(spec=AdapterStore, **{"load.side_effect": load})
        self.adapters.append(engine.adapters)
        return EngineThread(engine)

    def add(self, name: str, num_bytes: int = 4) -> OnDemandEngine:
        def load(stack: ExitStack) -> EngineClient:
            self.loads.append(name)
            stack.callback(self.loads.append, f"{name} ends")
            if name in self.broken:
                raise ToolkitError(f"{name} is broken", "Mend it")
            return EngineThread(new_engine(TroubledRunner(2000, 4, 1000)))

        self.engines[name] = OnDemandEngine(name, num_bytes, self.memory, load)
        return self.engines[name]

    @property
    def loaded(self) -> set[str]:
        return set(self.memory.residents)


async def ask(engine: OnDemandEngine, sampling: SamplingParams = SHORT) -> list[Delta]:
    return [delta async for deltas in engine.generate([1, 2], sampling) for delta in deltas]


def with_models(test: Callable[[Models], Coroutine[Any, Any, None]], names: str = "abc") -> None:
    models = Models()
    for name in names:
        models.add(name)

    async def run() -> None:
        try:
            await asyncio.wait_for(test(models), SECONDS)
        finally:
            for engine in models.engines.values():
                await asyncio.to_thread(engine.stop)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_the_first_request_loads_once_for_all() -> None:
    async def run(models: Models) -> None:
        found = await asyncio.gather(*(ask(models.engines["a"]) for _ in range(5)))
        assert all(deltas[-1].finish_reason is FinishReason.LENGTH for deltas in found)
        assert models.loads == ["a"]
        assert models.engines["b"].check().healthy

    with_models(run)


def test_the_least_recently_used_model_makes_room() -> None:
    async def run(models: Models) -> None:
        for name in "abac":
            await ask(models.engines[name])
        assert models.loaded == {"a", "c"}
        assert models.loads == ["a", "b", "b ends", "c"]
        await ask(models.engines["b"])
        assert models.loaded == {"b", "c"}

    with_models(run)


def test_a_busy_model_stays_and_others_answer_while_one_waits_for_room() -> None:
    async def run(models: Models) -> None:
        engines = models.engines
        busy = [asyncio.create_task(ask(engines[name], ENDLESS)) for name in "ab"]
        await until(lambda: engines["a"].check().num_running + engines["b"].check().num_running == 2)
        waiting = asyncio.create_task(ask(engines["c"]))
        await ask(engines["a"])
        assert (models.loaded, engines["c"].check().num_waiting) == ({"a", "b"}, 1)
        busy[1].cancel()
        assert (await waiting)[-1].finish_reason is FinishReason.LENGTH
        assert models.loaded == {"a", "c"}
        busy[0].cancel()

    with_models(run)


def test_a_model_is_not_loaded_for_a_request_that_has_left() -> None:
    async def run(models: Models) -> None:
        engines = models.engines
        busy = [asyncio.create_task(ask(engines[name], ENDLESS)) for name in "ab"]
        await until(lambda: models.loaded == {"a", "b"})
        waiting = asyncio.create_task(ask(engines["c"]))
        await until(lambda: "c" in models.memory.waiting)
        waiting.cancel()
        await until(lambda: not models.memory.waiting)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        assert (models.loaded, models.loads) == ({"a", "b"}, ["a", "b"])

    with_models(run)


def test_requests_that_keep_coming_do_not_keep_another_model_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "PATIENCE_SECONDS", 0.05)

    async def run(models: Models) -> None:
        engine = models.add("big", 8)

        async def keep_asking() -> None:
            while True:
                await asyncio.gather(ask(models.engines["a"]), asyncio.sleep(0.001))

        tasks = [asyncio.create_task(keep_asking()) for _ in range(3)]
        await until(lambda: models.loaded == {"a"})
        assert (await ask(engine))[-1].finish_reason is FinishReason.LENGTH
        await until(lambda: models.loads.count("a") == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_models(run)


def test_a_model_that_cannot_be_loaded_is_tried_again_and_holds_no_memory() -> None:
    async def run(models: Models) -> None:
        models.broken.add("a")
        for _ in range(2):
            (last,) = await ask(models.engines["a"])
            assert last.finish_reason is FinishReason.ERROR
            assert last.error == "the model a cannot be loaded: a is broken. Mend it."
        assert models.loads == ["a", "a ends"] * 2
        await asyncio.gather(ask(models.engines["b"]), ask(models.engines["c"]))
        assert models.loaded == {"b", "c"}
        models.broken.clear()
        assert (await ask(models.engines["a"]))[-1].finish_reason is FinishReason.LENGTH

    with_models(run)


def test_an_engine_that_died_is_loaded_again() -> None:
    async def run(models: Models) -> None:
        with engine_process() as first, engine_process() as second:
            processes = [first, second]
            engine = OnDemandEngine("d", 4, models.memory, lambda _: processes.pop(0))
            running = asyncio.create_task(ask(engine, ENDLESS))
            await until(lambda: engine.check().num_running == 1)
            first.process.kill()
            assert (await running)[-1].finish_reason is FinishReason.ERROR
            assert engine.check().healthy
            assert (await ask(engine))[-1].finish_reason is FinishReason.LENGTH
            assert not processes
            await asyncio.to_thread(engine.stop)

    with_models(run)


def test_metrics_say_what_is_loaded_and_have_the_label_of_their_model() -> None:
    async def run(models: Models) -> None:
        await ask(models.engines["a"])
        text = await models.engines["a"].render_metrics("one")
        assert 'runtime_model_loaded{model_name="one"} 1.0' in text
        assert 'runtime_prompt_tokens_total{model_name="one"} 2.0' in text
        assert 'vllm:prompt_tokens_total{engine="0",model_name="one"} 2.0' in text
        text = await models.engines["b"].render_metrics("two")
        assert 'runtime_model_loads_total{model_name="two"} 0.0' in text
        assert "prompt_tokens" not in text

    with_models(run)


def test_an_engine_that_is_loaded_again_gets_the_adapters_of_now(tmp_path: Path) -> None:
    async def run(models: Models) -> None:
        adapted = OnDemandEngine("d", 8, models.memory, models.load_adapted, adapters={"first": tmp_path})
        await adapted.change_adapters("second", tmp_path)  # loads the engine
        await adapted.change_adapters("gone", tmp_path)
        assert models.adapters[0].mock_calls == [call.load(name, tmp_path) for name in ("first", "second", "gone")]
        for name in ("a", "b"):
            await ask(models.engines[name])
        await adapted.change_adapters("gone", None)
        assert models.loaded == {"a", "b"}  # nothing was loaded to forget a name
        await ask(adapted)
        assert models.adapters[1].mock_calls == [call.load(name, tmp_path) for name in ("first", "second")]
        await adapted.change_adapters("first", None)
        models.adapters[1].unload.assert_called_once_with("first")
        assert adapted.adapters == {"second": tmp_path}

    with_models(run, "ab")


def test_an_adapter_that_cannot_be_loaded_leaves_the_model_and_the_others(tmp_path: Path) -> None:
    async def run(models: Models) -> None:
        models.wrong.add("wrong")
        engine = OnDemandEngine("d", 8, models.memory, models.load_adapted, adapters={"wrong": tmp_path, "x": tmp_path})
        assert (await ask(engine))[-1].finish_reason is FinishReason.LENGTH
        assert models.adapters[0].mock_calls == [call.load("wrong", tmp_path), call.load("x", tmp_path)]
        with pytest.raises(RequestError, match="no room for wrong"):
            await engine.change_adapters("wrong", tmp_path)

    with_models(run)


def test_an_adapter_of_a_model_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def run(models: Models) -> None:
        models.broken.add("a")
        with pytest.raises(ToolkitError, match="a is broken"):
            await models.engines["a"].change_adapters("x", tmp_path)
        assert not models.engines["a"].adapters
        assert not models.loaded

    with_models(run)

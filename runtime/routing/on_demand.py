"""Engines of several models in one memory: each is loaded by its first request, and unloaded where another needs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compress.common.errors import ToolkitError
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine import NO_OPTIONS
from runtime.engine.engine_client import EngineClient, Health
from runtime.engine.metrics import PREFIX, add_label, join, render
from runtime.routing.residents import Resident, choose_unloads

logger = logging.getLogger("runtime.server")

Load = Callable[[ExitStack], EngineClient]
"""Loads an engine, which the end of the stack ends. Runs in a thread; raises an exception if it cannot be loaded."""


PATIENCE_SECONDS = 10.0
"""Time for which a model waits for others to be idle before their further requests wait for it."""


class ModelMemory:
    """The memory that engines share. Used on one event loop's thread.

    Args:
        limit: bytes of all of them.
        clock: returns seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.clock = limit, clock
        self.waiting: dict[str, float] = {}
        """Since when models wait for room."""
        self.residents: dict[str, Resident] = {}
        self.engines: dict[str, OnDemandEngine] = {}
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes who waits for room."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def make_room(self, engine: OnDemandEngine) -> bool:
        """Reserves the memory of an engine, once idle models that were used least recently are unloaded. Returns False
        if its requests have left meanwhile."""
        self.waiting[engine.name] = self.clock()
        try:
            return await self._make_room(engine)
        finally:
            del self.waiting[engine.name]
            self.notify()

    async def _make_room(self, engine: OnDemandEngine) -> bool:
        while engine.num_requests:
            unloads = choose_unloads(self.residents, engine.num_bytes, self.limit)
            if unloads is None or engine.name in self.residents or engine.name not in (self._late() or self.waiting):
                await self._changed.wait()
                continue
            self.residents[engine.name] = Resident(engine.num_bytes)  # before others see what is freed
            await asyncio.gather(*(self.engines[name].unload() for name in unloads))
            return True
        return False

    def _late(self) -> list[str]:
        """Returns the name of the model that has waited longest, if that is for `PATIENCE_SECONDS`."""
        late = self.clock() - PATIENCE_SECONDS
        return [name for name, since in self.waiting.items() if since <= late][:1]

    async def wait_turn(self, name: str) -> None:
        """Holds a request while a model that has waited for `PATIENCE_SECONDS` needs the memory of its model, whose
        other requests end before it is unloaded."""
        while name in self._wanted():
            await self._changed.wait()

    def _wanted(self) -> set[str]:
        """Returns the names of models that must be unloaded for the one that has waited for long."""
        idle = {name: replace(resident, is_idle=True) for name, resident in self.residents.items()}
        late = [self.engines[name].num_bytes for name in self._late()]
        return {name for size in late for name in choose_unloads(idle, size, self.limit) or ()}

    def release(self, name: str) -> None:
        """Frees the memory of an engine that has ended."""
        self.residents.pop(name, None)
        self.notify()


class OnDemandEngine(EngineClient, Collector):
    """Engine of one of several models: the first request loads it, and so does one after it was unloaded or has died.
    Requests wait meanwhile; they end with an error if it cannot be loaded.

    Args:
        name: of the model.
        num_bytes: memory of the loaded engine.
        memory: memory that it shares with the engines of other models.
        load: loads it.
        engine: the engine, if it is loaded already with the adapters, not started.
        adapters: paths of adapters by name, which each loaded engine gets.
    """

    def __init__(
        self,
        name: str,
        num_bytes: int,
        memory: ModelMemory,
        load: Load,
        engine: EngineClient | None = None,
        adapters: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self.name, self.num_bytes, self.memory = name, num_bytes, memory
        self.num_requests = 0
        self.num_loads = int(engine is not None)
        self.adapters = dict(adapters)
        self._load, self._engine = load, engine
        self._stack = ExitStack()
        self._loading: asyncio.Task[None] | None = None
        self._has_stopped = False
        memory.engines[name] = self
        if engine is not None:
            memory.residents[name] = Resident(num_bytes, memory.clock(), is_idle=True)

    def start(self) -> None:
        if self._engine is not None:
            self._engine.start()

    def stop(self, timeout: float = 30.0) -> bool:
        self._has_stopped = True
        has_ended = self._engine is None or self._engine.stop(timeout)
        self._stack.close()  # of an engine that is being loaded as well
        return has_ended

    def check(self) -> Health:
        """Returns the health of the engine. One that is not loaded is healthy, and so is one that the next request
        loads again."""
        found = None if self._engine is None else self._engine.check()
        if found is None or found.has_ended:
            return Health(True, "", 0, self.num_requests, 0.0)
        return replace(found, num_waiting=max(found.num_waiting, self.num_requests - found.num_running))

    async def render_metrics(self, model_name: str = "", engine: str = "") -> str:
        """Renders the metrics of the engine, if it is loaded, and of its loads, all with the label `model_name`."""
        texts = [] if self._engine is None else [await self._engine.render_metrics(model_name, engine)]
        return add_label(join([*texts, render(self)]), "model_name", model_name)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of its loads."""
        is_loaded = self._engine is not None
        yield GaugeMetricFamily(f"{PREFIX}model_loaded", "Whether the model is in memory.", value=is_loaded)
        yield CounterMetricFamily(f"{PREFIX}model_loads_total", "Loads of the model.", value=self.num_loads)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> AsyncGenerator[list[Delta], None]:
        await self.memory.wait_turn(self.name)
        with self._counted():
            try:
                engine = await self._loaded()
            except Exception as error:  # whatever it is, it is only this model's
                logger.error("the model %s was not loaded: %s", self.name, error)
                reason = FinishReason.ABORT if self._has_stopped else FinishReason.ERROR
                text, name = f"the model {self.name} cannot be loaded: {error}", request_id or ""
                yield [Delta(name, finish_reason=reason, error=text, index=index) for index in range(sampling.n)]
                return
            async with aclosing(engine.generate(prompt_token_ids, sampling, request_id, options)) as groups:
                async for deltas in groups:
                    yield deltas

    async def change_adapters(self, name: str, path: Path | None) -> None:
        """Loads or unloads an adapter. Loads the engine to check a new one; raises the exception of `Load` then."""
        if path is None:
            await self._unload_adapter(name)
            return
        await self.memory.wait_turn(self.name)
        with self._counted():
            await (await self._loaded()).change_adapters(name, path)
            self.adapters[name] = path

    async def _unload_adapter(self, name: str) -> None:
        if self._loading is not None:
            await asyncio.wait([self._loading])
        self.adapters.pop(name, None)
        if self._engine is not None and not self._engine.check().has_ended:
            await self._engine.change_adapters(name, None)

    async def unload(self) -> None:
        """Ends the engine, and frees its memory."""
        self.memory.residents[self.name].is_idle = False
        engine, self._engine = self._engine, None
        if engine is not None:
            logger.info("unloading the model %s", self.name)
            await asyncio.to_thread(engine.stop)
        await asyncio.to_thread(self._stack.close)
        self.memory.release(self.name)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a request, because of which the engine is not idle."""
        self.num_requests += 1
        self._note_use()
        try:
            yield
        finally:
            self.num_requests -= 1
            self._note_use()
            self.memory.notify()

    def _note_use(self) -> None:
        resident = self.memory.residents.get(self.name)
        if resident is not None and self._engine is not None:
            resident.last_used, resident.is_idle = self.memory.clock(), not self.num_requests

    async def _loaded(self) -> EngineClient:
        """Returns the engine once it is loaded. Raises the exception of `Load`."""
        while self._engine is None or self._engine.check().has_ended:
            if self._loading is None:
                self._loading = asyncio.create_task(self._replace())
                self._loading.add_done_callback(self._note_loaded)
            await asyncio.shield(self._loading)
        return self._engine

    def _note_loaded(self, loading: asyncio.Task[None]) -> None:
        self._loading = None
        if not loading.cancelled():
            loading.exception()  # its requests have it; without any, it is not logged as lost

    async def _replace(self) -> None:
        """Loads the engine in place of one that has died."""
        if self._engine is not None:
            await self.unload()
        if not await self.memory.make_room(self):
            return
        logger.info("loading the model %s", self.name)
        try:
            engine = await asyncio.to_thread(self._load, self._stack)
        except BaseException:
            await asyncio.to_thread(self._stack.close)
            self.memory.release(self.name)
            raise
        engine.start()
        await self._load_adapters(engine)
        self._engine, self.num_loads = engine, self.num_loads + 1
        self._note_use()
        self.memory.notify()

    async def _load_adapters(self, engine: EngineClient) -> None:
        """Loads the adapters. One that is not there any more concerns its own requests only."""
        for name, path in [*self.adapters.items()]:
            try:
                await engine.change_adapters(name, path)
            except ToolkitError as error:
                logger.error("the adapter %s of the model %s was not loaded: %s", name, self.name, error)

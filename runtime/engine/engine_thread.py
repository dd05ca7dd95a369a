"""Engine in a thread of the process that serves it."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.engine.engine import Engine
from runtime.engine.engine_client import Item, RequestStream, SingleEngineClient, post
from runtime.engine.engine_loop import Abort, EngineLoop, Events, Message, Status


class EngineThread(SingleEngineClient):
    """Thread that runs an engine and serves any number of asyncio tasks, of several event loops as well.

    Args:
        engine: engine that the thread uses exclusively.
        stall_seconds: as for `SingleEngineClient`.
        idle_work: as for `EngineLoop`.
    """

    def __init__(
        self, engine: Engine, *, stall_seconds: float = 120.0, idle_work: Iterable[Callable[[], object]] = ()
    ) -> None:
        super().__init__(engine.tokenizer, engine.runner.eos_token_ids, stall_seconds)
        self.engine = engine
        self.loop = EngineLoop(engine, self._receive, idle_work)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._accepting = True
        self._thread.start()

    async def render_metrics(self, model_name: str = "", engine: str = "") -> str:
        return self.engine.render_metrics(model_name, engine)

    async def change_adapters(self, name: str, path: Path | None) -> None:
        if error := await asyncio.wrap_future(self.loop.change_adapters(name, path)):
            raise error

    def _put(self, message: Message) -> None:
        self.loop.put(message)

    def _is_running(self) -> bool:
        return self._thread.is_alive()

    def _join(self, timeout: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self.loop.run()
        self._dismiss_all()

    def _receive(self, events: Events, status: Status) -> None:
        """Delivers events, with one wake-up per event loop."""
        self._status = status
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Item]]] = defaultdict(list)
        for number, item in events:
            if stream := self._streams.get(number):
                by_loop[stream.loop].append((stream, item))
        lost = {loop for loop, items in by_loop.items() if not post(loop, items)}
        for number, _ in events if lost else ():  # an event loop was closed without closing its generators
            stream = self._streams.get(number)
            if stream is not None and stream.loop in lost:
                del self._streams[number]
                self._put(Abort(number, stream.request_id))

"""An engine that generates and one that computes its prompts, in threads of this process."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poisoned_memory import poison

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, RequestOptions, SamplingParams
from runtime.engine.engine import NO_OPTIONS, Engine
from runtime.engine.engine_client import EngineClient
from runtime.engine.engine_thread import EngineThread
from runtime.llm import load_engine
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner
from runtime.transfer.join import join
from runtime.transfer.options import DECODE, PREFILL, TransferPart

SECONDS = 60.0
EXACT = {"device": "cpu", "dtype": "float64", "linear_backend": "reference", "num_blocks": 128, "max_model_len": 1024}
CHUNK = {"prefill_chunk": 64}


def until(condition: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def load(path: Path, config: RuntimeConfig) -> Engine:
    """Loads an engine, of the demo model or of one without a tokenizer."""
    if path == demo_model_path():
        return load_engine(path, config)[0]
    decoder = load_model(path, dtype="float64")
    runner = build_runner(decoder, config)
    poison(runner.pages.memory)
    return Engine(runner, None, config)


def start(path: Path, part: TransferPart | None, **options: Any) -> EngineThread:
    """Starts one engine."""
    config = RuntimeConfig(**(EXACT | CHUNK | options))
    engine = load(path, config if part is None else part.adapt(config))
    client = EngineThread(engine)
    if part is not None:
        join(client.loop, engine.runner, path, part)
    client.start()
    return client


@dataclass
class Separate:
    """Both engines."""

    prefill: EngineThread
    decode: EngineThread

    @property
    def receiver(self) -> Any:
        return self.decode.loop.transfer

    @property
    def results(self) -> dict[str, int]:
        """Prompts that the other engine was asked for, by result."""
        return dict(self.decode.engine.metrics.remote_prefills_total)

    @property
    def engines(self) -> list[Engine]:
        return [self.prefill.engine, self.decode.engine]

    def check(self) -> None:
        """Waits until nothing is computed, and verifies that nothing is left over."""
        pools = [engine.scheduler.pool for engine in self.engines]
        until(lambda: not any(engine.has_work for engine in self.engines) and not self.receiver.num_waiting)
        until(lambda: all(pool.num_free == pool.num_blocks for pool in pools))
        until(lambda: not (pools[1].tier._reserved or pools[1].tier._held))
        for engine in self.engines:
            engine.scheduler.check()


@contextmanager
def separate(
    path: Path | None = None, local_tokens: int = 0, connector: str = "shared-memory", **options: Any
) -> Iterator[Separate]:
    """Runs both engines with the same options."""
    path = path or demo_model_path()
    with tempfile.TemporaryDirectory() as folder:
        sockets = (Path(folder) / "prefill",)
        prefill = start(path, TransferPart(PREFILL, sockets), **options)
        decode = start(path, TransferPart(DECODE, sockets, local_tokens, connector), **options)
        try:
            both = Separate(prefill, decode)
            until(lambda: both.receiver.peers[0].link)
            yield both
        finally:
            for client in (decode, prefill):
                assert client.stop()


@contextmanager
def alone(path: Path | None = None, **options: Any) -> Iterator[EngineThread]:
    """Runs one engine with the same options."""
    client = start(path or demo_model_path(), None, **options)
    try:
        yield client
    finally:
        assert client.stop()


async def collect(
    client: EngineClient, prompt: Sequence[int], sampling: SamplingParams, options: RequestOptions = NO_OPTIONS
) -> list[Delta]:
    """Answers to a request."""
    return [delta async for deltas in client.generate(prompt, sampling, options=options) for delta in deltas]


Asked = tuple[Sequence[int], SamplingParams]


def answers(client: EngineClient, requests: Sequence[Asked], at_once: bool = True) -> list[list[Any]]:
    """Contents of the answers to requests."""

    async def ask() -> list[list[Delta]]:
        tasks = [collect(client, *request) for request in requests]
        return await asyncio.gather(*tasks) if at_once else [await task for task in tasks]

    return [list(map(contents, joined(deltas))) for deltas in asyncio.run(ask())]


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta for each answer."""
    found = {delta.index: Delta("", index=delta.index) for delta in deltas}
    for delta in deltas:
        found[delta.index].append(delta)
    return [found[index] for index in sorted(found)]


def contents(delta: Delta) -> Any:
    """Returns the visible parts of an answer. The last digits of float64 depend on who shared the steps."""
    logprobs = [(round(each.logprob, 9), *each.top) for each in delta.logprobs]
    logprobs = [(first, [(token, round(value, 9)) for token, value in top]) for first, *top in logprobs]
    return delta.text, delta.token_ids, logprobs, delta.finish_reason, delta.stop_string, delta.error

"""Cost of streaming: tokens through HTTP from a runner that answers at once, and the first token of one client.

The server and the client have a process each, and processor time of each is counted; the engine runs in the server's
process or in one of its own (`--api-process`), whose time is told apart. The engine alone runs the same requests in a
process of its own; what the server takes beyond that is the cost of HTTP. Steps of `--step` milliseconds wait, as for a
GPU; those of `--launch` milliseconds run Python, as while kernels are launched.

    python scripts/bench_serve.py streaming                        # 64 clients
    python scripts/bench_serve.py streaming --api-process          # the engine alone in a process
    python scripts/bench_serve.py streaming --path /v1/chat/completions --clients 16
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from statistics import median

from benchmarking.machine import Stopwatch, in_own_process, open_console, process_seconds
from benchmarking.step_cost import InstantRunner
from benchmarking.tables import Row, print_with_markdown
from compress.common.cli import demo_model_path
from runtime.core.config import Limits, RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.core.step import ComputedStep, StepPlan
from runtime.engine.engine import Engine
from runtime.engine.engine_client import EngineClient
from runtime.engine.engine_loop import EngineLoop
from runtime.engine.engine_process import EnginePort, EngineProcess
from runtime.engine.engine_thread import EngineThread
from runtime.engine.wire import receive, send, start_process
from runtime.text.tokenizer import Tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


@dataclass(frozen=True)
class Work:
    """Requests of a measurement.

    Attributes:
        clients: requests in flight.
        requests: number of requests.
        tokens: tokens of each answer.
        step: milliseconds for which a step waits.
        launch: milliseconds for which it holds the interpreter lock.
        apart: whether the engine has a process of its own.
    """

    path: str
    clients: int
    requests: int
    tokens: int
    step: float = 0.0
    launch: float = 0.0
    apart: bool = False

    def body(self) -> bytes:
        """Returns a request with its head."""
        said = {"model": "stub", "stream": True, "max_tokens": self.tokens, "temperature": 0}
        if self.path == "/v1/completions":
            said |= {"prompt": PROMPT, "ignore_eos": True}
        elif self.path == "/v1/responses":
            said |= {"input": PROMPT, "max_output_tokens": said.pop("max_tokens")}
        else:
            said |= {"messages": [{"role": "user", "content": PROMPT}]}
        content = json.dumps(said).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class BusyRunner(InstantRunner):
    """Runner whose steps take some time."""

    def __init__(self, work: Work) -> None:
        super().__init__(work.clients * (512 + work.tokens) // 16, 0)
        self.step, self.launch = work.step / 1000, work.launch / 1000

    def submit(self, plan: StepPlan) -> ComputedStep:
        if self.step:
            time.sleep(self.step)
        end = time.perf_counter() + self.launch
        while time.perf_counter() < end:
            pass
        return super().submit(plan)


def new_engine(work: Work, tokenizer: Tokenizer) -> Engine:
    config = RuntimeConfig(max_num_seqs=work.clients, max_num_batched_tokens=max(512, work.clients))
    return Engine(BusyRunner(work), tokenizer, config)


@dataclass
class Timed:
    """Figures of a measurement: wall and processor seconds, those of the engine's process among them, times of first
    tokens, events and reads of the client."""

    seconds: float
    processor: float
    engine: float = 0.0
    client: float = 0.0
    first: list[float] = field(default_factory=list)
    events: int = 0
    reads: int = 0


def run_engine(work: Work) -> Timed:
    """Runs the requests in an engine without a server."""
    tokenizer = Tokenizer.open(demo_model_path())
    engine, prompt = new_engine(work, tokenizer), tokenizer.encode(PROMPT)
    sampling = SamplingParams(work.tokens, temperature=0, ignore_eos=True)
    began: dict[str, float] = {}
    first: list[float] = []
    left, watch = work.requests, Stopwatch()
    while left or engine.has_work:
        for _ in range(min(left, work.clients - len(began))):
            asked = time.perf_counter()
            began[engine.add_request(prompt, sampling)] = asked
            left -= 1
        for delta in engine.step():
            if delta.num_output_tokens == 1:
                first.append(time.perf_counter() - began[delta.request_id])
            if delta.finish_reason is not None:
                del began[delta.request_id]
    return Timed(*watch.read(), first=first)


def run_apart(end: int) -> None:
    """Runs the engine for the server at the other end of a socket."""
    port = EnginePort(end)
    engine = new_engine(port.receive(), Tokenizer.open(demo_model_path()))
    port.loop.set_result(EngineLoop(engine, port.deliver))
    port.listen()
    port.send((engine.runner.max_model_len, engine.runner.eos_token_ids))
    port.loop.result().run()


def start_engine(work: Work, tokenizer: Tokenizer) -> tuple[EngineClient, int, int]:
    """Returns the engine, its context and its process."""
    if not work.apart:
        engine = new_engine(work, tokenizer)
        return EngineThread(engine), engine.runner.max_model_len, os.getpid()
    mine, theirs = socket.socketpair()
    process = start_process("benchmarking.streaming:run_apart", theirs)
    send(mine, work)
    max_model_len, ends = receive(mine)
    return EngineProcess(process, mine, tokenizer, ends), max_model_len, process.pid


def serve(work: Work, connection: Connection) -> None:
    """Serves the engine; sends the port, and the ids of the processes of the server and the engine."""
    from runtime.server.app import create_app
    from runtime.server.drain import create_server

    tokenizer = Tokenizer.open(demo_model_path())
    client, max_model_len, engine = start_engine(work, tokenizer)
    app = create_app(client, tokenizer, "stub", Limits(max_model_len=max_model_len, max_requests=2 * work.clients))
    listener = socket.create_server(("127.0.0.1", 0))
    gc.freeze()  # as `runtime serve` does
    connection.send((listener.getsockname()[1], os.getpid(), engine))
    create_server(app, drain_seconds=5, client_seconds=60).run(sockets=[listener])


@contextmanager
def serving(work: Work) -> Iterator[tuple[int, int, int]]:
    """Runs the server in a process of its own; yields its port, and the processes of the server and the engine."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine.recv()
    finally:
        process.kill()
        process.join()


class Client(asyncio.Protocol):
    """One connection, which sends a request when the last one is answered. It only counts bytes, to cost little."""

    def __init__(self, work: Work, timed: Timed, left: list[None], ended: asyncio.Future[None]) -> None:
        self.request, self.timed, self.left, self.ended = work.body(), timed, left, ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        if not self.left:
            self.ended.set_result(None)
            return
        self.left.pop()
        self.asked, self.is_first = time.perf_counter(), True
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.timed.reads += 1
        self.timed.events += (count := data.count(b"data: "))
        if self.is_first and count:
            self.is_first = False
            self.timed.first.append(time.perf_counter() - self.asked)
        if data.endswith(b"0\r\n\r\n"):
            self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the server closed a connection"))


async def load(work: Work, port: int) -> Timed:
    """Sends the requests over as many connections as there are clients."""
    loop, left, watch = asyncio.get_running_loop(), [None] * work.requests, Stopwatch()
    timed = Timed(0.0, 0.0)
    ends = [loop.create_future() for _ in range(work.clients)]
    for ended in ends:
        await loop.create_connection(lambda ended=ended: Client(work, timed, left, ended), "127.0.0.1", port)
    await asyncio.gather(*ends)
    timed.seconds, timed.client = watch.read()
    return timed


def run_http(work: Work) -> Timed:
    """Runs the requests through HTTP, after a few that warm the server up."""
    with serving(work) as (port, server, engine):
        warm_up = Work(work.path, work.clients, work.clients, 8)
        asyncio.run(load(warm_up, port))
        before = [process_seconds(process) for process in (server, engine)]
        timed = asyncio.run(load(work, port))
        timed.processor, timed.engine = (process_seconds(p) - b for p, b in zip((server, engine), before, strict=True))
        timed.processor += timed.engine if work.apart else 0
    return timed


def row(name: str, work: Work, timed: Timed, alone: Timed) -> Row:
    tokens = work.requests * work.tokens
    return {
        "run": name,
        "tokens/s": f"{tokens / timed.seconds:,.0f}",
        "processor time, us/token": f"{1e6 * timed.processor / tokens:.1f}",
        "of the engine's process": f"{1e6 * (timed.engine or timed.processor) / tokens:.1f}",
        "of HTTP": f"{1e6 * (timed.processor - alone.processor) / tokens:.1f}" if timed.client else "",
        "of the client": f"{1e6 * timed.client / tokens:.1f}" if timed.client else "",
        "events/token": f"{timed.events / tokens:.2f}" if timed.events else "",
        "events/read": f"{timed.events / timed.reads:.1f}" if timed.reads else "",
        "first token p50, ms": f"{1e3 * median(timed.first):.1f}",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", default=PATHS[0], choices=PATHS)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--api-process", action="store_true", help="give the engine a process of its own")
    parser.add_argument("--step", type=float, default=5.0, help="milliseconds of a step that waits")
    parser.add_argument("--launch", type=float, default=5.0, help="milliseconds of a step that runs Python")


def run(options: argparse.Namespace) -> int:
    console = open_console()
    many = Work(options.path, options.clients, options.requests, options.tokens, apart=options.api_process)
    one = replace(many, clients=1, requests=40, tokens=16)
    titles = {
        f"{many.clients} clients, steps without a model": many,
        f"{many.clients} clients, steps that wait {options.step:g} ms": replace(many, step=options.step),
        f"One client, steps that wait {options.step:g} ms": replace(one, step=options.step),
        f"One client, steps that run Python for {options.launch:g} ms": replace(one, launch=options.launch),
    }
    for title, work in titles.items():
        alone = in_own_process(run_engine, work)
        rows = [row("engine alone", work, alone, alone), row(work.path, work, run_http(work), alone)]
        print_with_markdown(title, rows, console)
    return 0

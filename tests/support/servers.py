"""Servers over real sockets in a thread of the test, and what is sent to them and comes out of them."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.engine.engine import Engine
from runtime.engine.engine_thread import EngineThread
from runtime.llm import load_engine
from runtime.server.app import create_app
from runtime.server.drain import create_server
from runtime.server.serving import Limits


@contextmanager
def running(server: uvicorn.Server) -> Iterator[uvicorn.Server]:
    """Runs a server; `address` is where it listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    server.address = listener.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield server
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Runs the application as `runtime serve` does; yields its URL."""
    with running(create_server(app, drain_seconds=5, client_seconds=60)) as server:
        yield url_of(server)


def url_of(server: uvicorn.Server) -> str:
    return f"http://127.0.0.1:{server.address[1]}"


@contextmanager
def serving_engine(engine: Engine, tokenizer: Any, max_requests: int = 32, **thread: float) -> Iterator[str]:
    """Serves an engine under the name `demo`."""
    limits = Limits(engine.runner.max_model_len, max_requests=max_requests)
    app = create_app(EngineThread(engine, **thread), tokenizer, "demo", limits)
    with serving(app) as url:
        yield url


@contextmanager
def serving_demo(max_requests: int = 32, **options: Any) -> Iterator[tuple[str, Engine, Any]]:
    """The demo model on the CPU: URL, engine and tokenizer. In float64 the shape of a batch cannot change a token."""
    config = {"device": "cpu", "dtype": "float64", "linear_backend": "reference", "num_blocks": 256}
    engine, tokenizer = load_engine(demo_model_path(), RuntimeConfig(**config | options))
    with serving_engine(engine, tokenizer, max_requests) as url:
        yield url, engine, tokenizer


def is_idle(engine: Engine) -> bool:
    """Whether nothing is computed and every block is free."""
    return not engine.has_work and engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def answer(api: httpx.Client, path: str, **body: Any) -> Any:
    """The whole answer to a request that is served."""
    response = api.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(api: httpx.Client, path: str, **body: Any) -> list[Any]:
    """The events of an answer that is streamed."""
    response = api.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def events(text: str, parse: Callable[[str], Any] = json.loads) -> list[Any]:
    """Events of a stream but the one that says that it is over."""
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [parse(line.removeprefix("data: ")) for line in lines]


def post_head(length: int, path: str = "/v1/completions", *more: str) -> bytes:
    """The head of a request with a body of some length."""
    kind = "Content-Type: application/json"
    lines = (f"POST {path} HTTP/1.1", "Host: x", kind, f"Content-Length: {length}", *more)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def send_raw(url: str | httpx.URL, path: str = "/v1/completions", *more: str, **body: Any) -> socket.socket:
    """Sends a request over a socket of its own, to be read from, left alone or closed."""
    content, address = json.dumps(body).encode(), httpx.URL(url)
    connection = socket.create_connection((address.host, address.port), timeout=60)
    connection.sendall(post_head(len(content), path, *more) + content)
    return connection

"""A server that stops: answers in flight end, new requests are refused, what is late gets an error, nothing crashes."""

import json
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from servers import events, post_head, running, send_raw, url_of

from runtime.core.config import Limits
from runtime.server.drain import DrainingServer, create_server
from runtime.server.intake import SHORT_BYTES

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 9}
FOREVER = 600.0


@dataclass
class Served:
    server: DrainingServer
    engine: Any
    tokenizer: Any

    @property
    def url(self) -> str:
        return url_of(self.server)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def post(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=COMPLETION | fields, timeout=20)

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health")

    @property
    def has_stopped(self) -> bool:
        try:
            socket.create_connection(self.server.address).close()
        except OSError:
            return True
        return False


@pytest.fixture
def serve(alphabet_parts: Any, no_traceback: None) -> Iterator[Callable[..., Served]]:
    """Starts servers, in whose log no traceback may be in the end."""
    with ExitStack() as servers:

        def start(drain_seconds: float = FOREVER, **options: Any) -> Served:
            app, engine, tokenizer = alphabet_parts(**options)
            app.state.drain.write_seconds = 0.3
            server = servers.enter_context(running(create_server(app, drain_seconds, client_seconds=60)))
            served = Served(server, engine, tokenizer)
            servers.callback(served.signal)  # at the end of a failed test
            return served

        yield start


def hang(served: Served, pool: ThreadPoolExecutor, wait_until: Any, *bodies: dict[str, Any]) -> list[Any]:
    """Sends requests; the first one stops after three tokens, the others before."""
    served.engine.close_gate_at = 3
    answers = []
    for number, body in enumerate(bodies, start=1):
        answers.append(pool.submit(served.post, **body))
        wait_until(lambda number=number: len(served.engine.active) == number)
    wait_until(lambda: not served.engine.gate.is_set())
    served.engine.close_gate_at = None
    return answers


def test_answers_end_and_new_requests_are_refused(serve: Any, wait_until: Any) -> None:
    served = serve()
    with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=served.url) as kept:
        stream, whole = hang(served, pool, wait_until, {"stream": True}, {})
        assert kept.get("/v1/models").status_code == 200
        served.signal()
        for path, body in (("/v1/completions", COMPLETION), ("/v1/models", None), ("/nowhere", None)):
            refused = kept.request("POST" if body else "GET", path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        health = kept.get("/health")
        assert (health.status_code, health.headers["connection"]) == (503, "close")
        assert health.json() | {"reason": ""} == {"status": "draining", "reason": "", "running": 2, "waiting": 0}
        assert kept.head("/health").status_code == 503
        assert kept.get("/metrics").status_code == 200
        served.engine.gate.set()
        assert len(events(stream.result().text)) == 10
        assert whole.result().json()["choices"][0]["text"] == "nopqrstuv"
        wait_until(lambda: served.has_stopped)


@pytest.mark.parametrize(("seconds", "signals"), [(0.0, 1), (FOREVER, 2)])
def test_late_answers_get_an_error(serve: Any, wait_until: Any, seconds: float, signals: int) -> None:
    served = serve(seconds)
    with ThreadPoolExecutor(3) as pool:
        stream, *whole = hang(served, pool, wait_until, {"stream": True}, {}, {"n": 2})
        for _ in range(signals):
            served.signal()
        *parts, error = events(stream.result().text)
        assert (len(parts), error["error"]["code"]) == (3, "aborted")
        for answer in whole:
            check_aborted(answer.result())
    wait_until(lambda: served.has_stopped)


def check_aborted(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["connection"] == "close"


def test_what_the_engine_does_not_know_gets_an_error(serve: Any, wait_until: Any) -> None:
    """A body that does not end, and a prompt that takes long to tokenize."""
    served = serve(0.0, limits=Limits(200_000))
    served.tokenizer.gate.clear()
    in_flight = served.server.drain.in_flight
    with ThreadPoolExecutor(1) as pool, socket.create_connection(served.server.address, timeout=20) as connection:
        tokenized = pool.submit(served.post, prompt="a" * SHORT_BYTES)
        connection.sendall(post_head(500) + b"{")
        wait_until(lambda: len(in_flight) == 2)
        served.signal()
        check_aborted(tokenized.result())
        with HTTPResponse(connection) as response:
            response.begin()
            assert (response.status, json.load(response)["error"]["code"]) == (503, "aborted")
        served.tokenizer.gate.set()
    wait_until(lambda: served.has_stopped)


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_idle_connections_do_not_keep_it(serve: Any, wait_until: Any, sent: bytes) -> None:
    served = serve()
    with socket.create_connection(served.server.address) as connection:
        connection.sendall(sent)
        wait_until(lambda: len(served.server.server_state.connections) == 1)
        served.signal()
        wait_until(lambda: served.has_stopped)


def test_a_stream_that_nobody_reads_does_not_keep_it(serve: Any, wait_until: Any) -> None:
    served = serve(0.0, limits=Limits(200_000))
    with send_raw(served.url, **COMPLETION | {"max_tokens": 150_000}, stream=True) as connection:
        connection.recv(1)
        wait_until(lambda: all(c.flow.write_paused for c in served.server.server_state.connections))
        served.signal()
        wait_until(lambda: served.has_stopped)


@pytest.mark.parametrize("count", [1, 2])
def test_clients_that_vanish_leave_no_trace(serve: Any, wait_until: Any, count: int) -> None:
    """Within their body, before and within their answer, and at the end of the drain."""
    served = serve(0.0)
    served.engine.close_gate_at = 3
    connections = [send_raw(served.url, **COMPLETION, stream=bool(index % 2)) for index in range(4)]
    cut = socket.create_connection(served.server.address)
    cut.sendall(post_head(500) + b"{")
    connections.append(cut)
    wait_until(lambda: len(served.server.drain.in_flight) == 5)
    for connection in connections[::count]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close is a reset
        connection.close()
    served.signal()
    wait_until(lambda: served.has_stopped)
    for connection in connections:
        connection.close()

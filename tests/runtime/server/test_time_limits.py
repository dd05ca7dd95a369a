"""Time limits: slow clients are dropped, slow requests and hanging engines are told of, and others are not affected."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from fake_runner import FakeRunner
from servers import events, is_idle, running, serving_engine
from servers import post_head as head

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.server.middleware import ReadTimeoutProtocol
from runtime.server.serving import Limits
from runtime.text.tokenizer import Tokenizer

SECONDS = 0.4
MARGIN = 20.0  # of a busy machine


@dataclass
class Server:
    url: str
    engine: Any

    def post(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"model": "alphabet", "prompt": "Z", **fields}, timeout=20)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((httpx.URL(self.url).host, httpx.URL(self.url).port))
        return connection


@pytest.fixture
def impatient(serve_alphabet: Any) -> Any:
    """Starts servers that wait no longer than they are told."""

    def serve(**seconds: float) -> Server:
        return Server(*serve_alphabet(limits=Limits(200_000, max_requests=4, **seconds)))

    return serve


def drip(connection: socket.socket, seconds: float) -> None:
    """Sends a byte now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(b" ")
        time.sleep(0.02)


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer after which the server closes the connection."""
    connection.settimeout(10)
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    top, _, body = received.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)


@pytest.mark.parametrize("sent", [b"", b'{"model": "alph'])
def test_body_that_does_not_end(impatient: Any, sent: bytes) -> None:
    server = impatient(client_seconds=SECONDS)
    with server.connect() as connection:
        start = time.monotonic()
        connection.sendall(head(500) + sent)
        status, body = answer_of(connection)
        assert SECONDS <= time.monotonic() - start < SECONDS + MARGIN
    assert status == 408
    assert body["error"]["code"] == "body_timeout"


def test_body_that_comes_byte_by_byte(impatient: Any) -> None:
    server = impatient(client_seconds=SECONDS)
    with server.connect() as connection:
        connection.sendall(head(500))
        with pytest.raises(OSError, match=r"reset|pipe"):
            drip(connection, SECONDS + MARGIN)


def test_slow_bodies_keep_nobody_from_being_served(impatient: Any) -> None:
    server = impatient(client_seconds=SECONDS)
    slow = [server.connect() for _ in range(50)]
    for connection in slow:
        connection.sendall(head(500) + b"{")
    assert server.post().status_code == 200
    assert {answer_of(connection)[0] for connection in slow} == {408}


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_in_time(impatient: Any, stream: bool) -> None:
    server = impatient(queue_seconds=SECONDS)
    server.engine.gate.clear()
    start = time.monotonic()
    response = server.post(stream=stream)
    assert SECONDS <= time.monotonic() - start < SECONDS + MARGIN
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
    assert int(response.headers["retry-after"]) >= 1
    assert not server.engine.active
    server.engine.gate.set()
    assert server.post().status_code == 200


def test_answer_that_takes_too_long(impatient: Any) -> None:
    server = impatient(request_seconds=SECONDS)
    server.engine.close_gate_at = 3
    start = time.monotonic()
    response = server.post()
    assert SECONDS <= time.monotonic() - start < SECONDS + MARGIN
    assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    assert not server.engine.active


def test_stream_that_takes_too_long_ends_with_an_error(impatient: Any) -> None:
    server = impatient(request_seconds=SECONDS)
    server.engine.close_gate_at = 3
    *parts, error, done = [line for line in server.post(stream=True).text.split("\n\n") if line]
    assert len(parts) == 3
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert done == "data: [DONE]"
    assert not server.engine.active


def test_client_that_does_not_read_is_given_up_and_stalls_nobody(impatient: Any, wait_until: Any) -> None:
    server = impatient(client_seconds=2.0)
    body = json.dumps({"model": "alphabet", "prompt": "Z", "max_tokens": 150_000, "stream": True}).encode()
    with server.connect(receive_buffer=4096) as idle:
        idle.sendall(head(len(body)) + body)
        wait_until(lambda: bool(server.engine.active))
        waited_for = set(server.engine.active)
        for _ in range(3):
            assert server.post(max_tokens=3).json()["choices"][0]["text"] == "nop"
        assert waited_for <= server.engine.active, "others are served meanwhile"
        wait_until(lambda: not server.engine.active)
    assert httpx.get(f"{server.url}/health").json()["running"] == 0


HTTP_SECONDS = 1.0
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNK = b"x" * 100_000
NUM_CHUNKS = 300  # more than all buffers on the way hold


async def long_answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Sends `NUM_CHUNKS` chunks, as fast as the client takes them."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(NUM_CHUNKS):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def server() -> Iterator[uvicorn.Server]:
    http = partial(ReadTimeoutProtocol, client_seconds=HTTP_SECONDS)
    config = uvicorn.Config(long_answer, http=http, lifespan="off", log_config=None)
    with running(uvicorn.Server(config)) as server:
        yield server


def connect(server: uvicorn.Server) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.address)
    connection.settimeout(60)
    return connection


def test_packets_are_sent_at_once(server: uvicorn.Server, wait_until: Callable[..., None]) -> None:
    with connect(server):
        wait_until(lambda: server.server_state.connections)
        (protocol,) = server.server_state.connections
        sending = protocol.transport.get_extra_info("socket")
        assert sending.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    wait_until(lambda: not server.server_state.connections)


@pytest.mark.parametrize("sent", [b"", HEAD[:5], HEAD[:-2], HEAD])
def test_all_sockets_come_back(server: uvicorn.Server, wait_until: Callable[..., None], sent: bytes) -> None:
    """Nothing sent, a part of a head, and a request whose answer is not read."""
    connections = [connect(server) for _ in range(20)]
    for connection in connections:
        connection.sendall(sent)
    wait_until(lambda: len(server.server_state.connections) == 20)
    start = time.monotonic()
    wait_until(lambda: not server.server_state.connections)
    assert time.monotonic() - start < HTTP_SECONDS + MARGIN
    wait_until(lambda: not server.server_state.tasks)
    for connection in connections:
        connection.close()


def test_a_slow_but_steady_reader_gets_everything(server: uvicorn.Server) -> None:
    """Longer than the limit in all, never in one pause."""
    with connect(server) as connection:
        connection.sendall(HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        num_bytes, start = 0, time.monotonic()
        while chunk := connection.recv(2**20):
            num_bytes += len(chunk)
            if time.monotonic() - start < 2 * HTTP_SECONDS:
                time.sleep(0.002)
        assert time.monotonic() - start > 2 * HTTP_SECONDS
        assert num_bytes > NUM_CHUNKS * len(CHUNK)


STALL_SECONDS = 1.0
BODY = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True}


class HangingRunner(FakeRunner):
    """Steps wait while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__(2000, 4, 1000)
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(0.002)
        self.gate.wait()
        return super().execute(plan)


@pytest.fixture
def served() -> Iterator[tuple[str, HangingRunner, Engine]]:
    runner, tokenizer = HangingRunner(), Tokenizer.open(demo_model_path())
    engine = Engine(runner, tokenizer, RuntimeConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=16))
    with serving_engine(engine, tokenizer, stall_seconds=STALL_SECONDS) as url:
        yield url, runner, engine
        runner.gate.set()


def test_everybody_hears_of_a_hang_and_it_ends(served: tuple[str, HangingRunner, Engine], wait_until: Any) -> None:
    url, runner, engine = served

    def ask(stream: bool) -> tuple[httpx.Response, float]:
        response = httpx.post(f"{url}/v1/completions", json={**BODY, "stream": stream}, timeout=30)
        return response, time.monotonic()

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, index % 2 == 0) for index in range(8)]
        wait_until(lambda: len(engine.scheduler.running) == 8)
        assert httpx.get(f"{url}/health").status_code == 200
        runner.gate.clear()
        start = time.monotonic()
        for future in asked:
            response, end = future.result()
            assert end - start < STALL_SECONDS + MARGIN
            check_told(response)
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "no progress for" in health.json()["reason"]
    late, _ = ask(stream=False)
    assert late.status_code == 500  # at once, not after another wait
    runner.gate.set()
    wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
    assert ask(stream=False)[0].status_code == 200
    wait_until(lambda: is_idle(engine))


def check_told(response: httpx.Response) -> None:
    """An error with its reason: as the answer, or as the last event of a stream."""
    if response.headers["content-type"].startswith("text/event-stream"):
        body = events(response.text)[-1]
    else:
        assert response.status_code == 500
        body = response.json()
    assert "no progress for" in body["error"]["message"]
    assert body["error"]["code"] == "generation_failed"

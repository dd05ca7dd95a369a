"""Time limits: slow clients are dropped, slow requests end with an error, and other requests are not affected."""

import json
import socket
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from servers import post_head as head

from runtime.server.serving import Limits

SECONDS = 0.4
MARGIN = 15.0  # of a busy machine


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

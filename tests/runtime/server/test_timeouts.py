"""Sockets of clients that do not go on come back, whatever waits in them."""

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn
from servers import running

from runtime.server.middleware import ReadTimeoutProtocol

SECONDS = 1.0
MARGIN = 15.0  # of a busy machine
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
    http = partial(ReadTimeoutProtocol, client_seconds=SECONDS)
    with running(uvicorn.Config(long_answer, http=http, lifespan="off", log_level="critical")) as server:
        yield server


def connect(server: uvicorn.Server) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.address)
    connection.settimeout(60)
    return connection


@pytest.mark.parametrize("sent", [b"", HEAD[:5], HEAD[:-2], HEAD])
def test_all_sockets_come_back(server: uvicorn.Server, wait_until: Callable[..., None], sent: bytes) -> None:
    """Nothing sent, a part of a head, and a request whose answer is not read."""
    connections = [connect(server) for _ in range(20)]
    for connection in connections:
        connection.sendall(sent)
    wait_until(lambda: len(server.server_state.connections) == 20)
    start = time.monotonic()
    wait_until(lambda: not server.server_state.connections)
    assert time.monotonic() - start < SECONDS + MARGIN
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
            if time.monotonic() - start < 2 * SECONDS:
                time.sleep(0.002)
        assert time.monotonic() - start > 2 * SECONDS
        assert num_bytes > NUM_CHUNKS * len(CHUNK)

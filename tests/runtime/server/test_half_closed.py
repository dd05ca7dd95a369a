"""Clients that stop sending after their request (`nc -N`) get their answer, and those that are gone are noticed."""

import re
import socket
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from servers import events, post_head, send_raw

BODY = b'{"model": "alphabet", "prompt": "Z", "max_tokens": 3}'
STREAM = BODY[:-1] + b', "stream": true}'
CHAT = b'{"model": "alphabet", "messages": [{"role": "user", "content": "Z"}], "max_tokens": 3}'
REQUESTS = {
    "whole": post_head(len(BODY)) + BODY,
    "stream": post_head(len(STREAM)) + STREAM,
    "chat": post_head(len(CHAT), "/v1/chat/completions") + CHAT,
    "HTTP/1.0": (post_head(len(BODY)) + BODY).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "refused": post_head(2) + b"{}",
    "get": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
}
LETTERS = re.compile(rb'"(?:text|content)":\s?"([^"]*)"')
SECONDS_TO_NOTICE = 2

pytestmark = pytest.mark.usefixtures("no_traceback")


def connected(url: Any) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port), timeout=20)


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def plain(answer: bytes) -> bytes:
    """An answer without what differs between two of them."""
    answer = re.sub(rb"(?im)^(date|x-request-id|connection): [^\r]*\r\n", b"", answer)
    return re.sub(rb'"(id|created)":\s?("[^"]*"|\d+)', b"", answer)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a while"])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_that_of_any_client(
    api: httpx.Client, engine: Any, wait_until: Callable[..., None], name: str, waits: bool
) -> None:
    closing = REQUESTS[name].replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    with connected(api.base_url) as usual:
        usual.sendall(closing)
        expected = all_of(usual)
    is_held = waits and name not in ("refused", "get")
    if is_held:
        engine.gate.clear()
    with connected(api.base_url) as connection:
        connection.sendall(REQUESTS[name])
        if is_held:
            wait_until(lambda: engine.active)
        connection.shutdown(socket.SHUT_WR)
        if is_held:
            time.sleep(0.2)  # in which the server looks whether the client is gone
            assert engine.active
            engine.gate.set()
        assert plain(all_of(connection)) == plain(expected)


def test_a_half_closed_connection_answers_all_of_its_requests(api: httpx.Client) -> None:
    with connected(api.base_url) as connection:
        connection.sendall(REQUESTS["whole"] + REQUESTS["get"] + REQUESTS["stream"])
        connection.shutdown(socket.SHUT_WR)
        answers = all_of(connection)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answers.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half_closed", [False, True])
def test_a_client_that_is_gone_is_noticed(api: httpx.Client, engine: Any, stream: bool, half_closed: bool) -> None:
    engine.gate.clear()
    connection = send_raw(api.base_url, model="alphabet", prompt="Z", max_tokens=50, stream=stream)
    end = time.monotonic() + 20
    while not engine.active:
        assert time.monotonic() < end
        time.sleep(0.005)
    if half_closed:
        connection.shutdown(socket.SHUT_WR)
    connection.close()
    end = time.monotonic() + SECONDS_TO_NOTICE
    while engine.active:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_stream_goes_on_for_a_client_that_half_closes_within(
    api: httpx.Client, engine: Any, wait_until: Callable[..., None]
) -> None:
    engine.close_gate_at = 2
    with send_raw(api.base_url, model="alphabet", prompt="Z", max_tokens=5, stream=True) as connection:
        wait_until(lambda: not engine.gate.is_set())
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.2)
        engine.close_gate_at = None
        engine.gate.set()
        with closing(HTTPResponse(connection)) as response:
            response.begin()
            found = events(response.read().decode())
    assert "".join(event["choices"][0]["text"] for event in found) == "nopqr"


def test_a_reader_of_a_stream_may_leave_after_it_half_closed(
    api: httpx.Client, engine: Any, wait_until: Callable[..., None]
) -> None:
    engine.close_gate_at = 3
    with send_raw(api.base_url, model="alphabet", prompt="Z", max_tokens=90, stream=True) as connection:
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: not engine.gate.is_set())
        assert LETTERS.search(connection.recv(65536))
    time.sleep(0.1)
    engine.close_gate_at = None
    engine.gate.set()
    wait_until(lambda: not engine.active)


@pytest.mark.parametrize(
    "sent", [b"", b"POST", REQUESTS["whole"][:-10], post_head(9, "/v1/models", "Expect: 100-continue")]
)
def test_a_request_that_stops_within_ends_its_connection(api: httpx.Client, sent: bytes) -> None:
    with connected(api.base_url) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert b"200" not in all_of(connection)

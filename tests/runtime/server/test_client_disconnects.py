"""A client that leaves frees its request, whatever state the request is in."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest


def send_request(api: httpx.Client, path: str = "/v1/completions", **fields: Any) -> socket.socket:
    """Sends a request over a socket of its own and returns the socket."""
    body = json.dumps({"model": "alphabet", "prompt": "Z", "max_tokens": 99, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((api.base_url.host, api.base_url.port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("prompt", ["Z", ["Y", "Z"]])
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(api: httpx.Client, engine: Any, wait_until: Any, stream: bool, prompt: Any) -> None:
    engine.gate.clear()
    connection = send_request(api, stream=stream, prompt=prompt, max_tokens=50)
    wait_until(lambda: bool(engine.active))
    connection.close()
    wait_until(lambda: not engine.active)


@pytest.mark.parametrize("prompt", ["Z", ["Y", "Z"]])
def test_in_the_middle_of_a_stream(api: httpx.Client, engine: Any, wait_until: Any, prompt: Any) -> None:
    engine.close_gate_at = 3
    connection = send_request(api, stream=True, prompt=prompt)
    received = b""
    while b'"text":"n"' not in received:
        received += connection.recv(4096)
    wait_until(lambda: not engine.gate.is_set())
    assert engine.active
    connection.close()
    wait_until(lambda: not engine.active)


def test_places_in_the_queue_come_back(api: httpx.Client, engine: Any, wait_until: Any) -> None:
    engine.gate.clear()
    for _ in range(3):
        connections = [send_request(api, stream=bool(i % 2)) for i in range(4)]
        wait_until(lambda: len(engine.active) == 4)
        for connection in connections:
            connection.close()
        wait_until(lambda: not engine.active)
    engine.gate.set()
    assert api.post("/v1/completions", json={"model": "alphabet", "prompt": "Z"}).status_code == 200

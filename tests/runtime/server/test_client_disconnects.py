"""A client that leaves frees its request, whatever state the request is in."""

import socket
from typing import Any

import httpx
import pytest
from servers import send_raw


def send_request(api: httpx.Client, **fields: Any) -> socket.socket:
    return send_raw(api.base_url, **{"model": "alphabet", "prompt": "Z", "max_tokens": 99, **fields})


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

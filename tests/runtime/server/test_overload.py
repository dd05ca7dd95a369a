"""Clients that are too many or leave: some wait, others hear 429, and every block comes back."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from servers import events, is_idle, send_raw, serving_demo

from runtime.engine.engine import Engine

PLACES = 8
PROMPTS = ["The castle was built in the", "Once upon a time", "In 1943", "He opened the door and"]


@dataclass
class Crowded:
    """A server with few places and fewer blocks than its requests would like."""

    url: str
    engine: Engine
    refused: list[httpx.Response] = field(default_factory=list)

    def body(self, index: int) -> dict[str, Any]:
        prompt = PROMPTS[index % len(PROMPTS)]
        return {"model": "demo", "prompt": prompt, "temperature": 0.8, "seed": index % 16, "max_tokens": 12}

    async def ask(self, client: httpx.AsyncClient, index: int) -> str:
        """Asks until there is room, as a client should; every other answer as a stream."""
        body = {**self.body(index), "stream": index % 2 == 1}
        while True:
            response = await client.post(f"{self.url}/v1/completions", json=body)
            if response.status_code == 200:
                return text_of(response)
            assert response.status_code == 429, response.text
            assert response.json()["error"]["code"] == "queue_full"
            self.refused.append(response)
            await asyncio.sleep(int(response.headers["retry-after"]) * 0.3)


def text_of(response: httpx.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["choices"][0]["text"]
    return "".join(event["choices"][0]["text"] for event in events(response.text))


@pytest.fixture(scope="module")
def crowded() -> Iterator[Crowded]:
    with serving_demo(PLACES, num_blocks=14, max_model_len=200) as (url, engine, _):
        yield Crowded(url, engine)


def check_normal(crowded: Crowded, wait_until: Any) -> None:
    wait_until(lambda: is_idle(crowded.engine))
    crowded.engine.scheduler.check()
    health = httpx.get(f"{crowded.url}/health")
    assert health.status_code == 200
    assert (health.json()["running"], health.json()["waiting"]) == (0, 0)
    response = httpx.post(f"{crowded.url}/v1/completions", json=crowded.body(0), timeout=60)
    assert response.status_code == 200


@pytest.mark.full
def test_ten_times_the_capacity(crowded: Crowded, wait_until: Any) -> None:
    bodies = [crowded.body(index) for index in range(16)]
    alone = [text_of(httpx.post(f"{crowded.url}/v1/completions", json=body, timeout=60)) for body in bodies]

    async def everybody() -> list[str]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(crowded.ask(client, index) for index in range(10 * PLACES)))

    texts = asyncio.run(everybody())
    assert len(crowded.refused) >= PLACES  # it was an overload
    assert texts == [alone[index % 16] for index in range(10 * PLACES)]  # and it changed no answer
    check_normal(crowded, wait_until)


@pytest.mark.full
def test_a_connection_outlives_the_pauses_of_clients(crowded: Crowded) -> None:
    url = httpx.URL(crowded.url)
    with closing(HTTPConnection(url.host, url.port, timeout=60)) as kept:
        kept.connect()
        first = kept.sock
        for pause in (0, 5.5):  # httpx and uvicorn give up after 5 seconds by default
            time.sleep(pause)
            kept.request("GET", "/health")
            with kept.getresponse() as response:
                assert (response.status, bool(response.read())) == (200, True)
            assert kept.sock is first


def vanish(url: str, body: dict[str, Any], num_bytes: int, seconds: float) -> None:
    """Sends a request, reads a number of bytes of its answer, waits some seconds, and resets the connection."""
    with send_raw(url, "/v1/completions", "Connection: close", **body) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close is a reset
        while num_bytes > 0 and (chunk := connection.recv(num_bytes)):
            num_bytes -= len(chunk)
        time.sleep(seconds)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_vanish_leave_every_block_free(crowded: Crowded, wait_until: Any, count: int) -> None:
    """Streaming or not, before, at and after the first token, without a place in the queue, by reset."""
    for index in range(count):
        endless = {"max_tokens": 150, "ignore_eos": True, "n": 1 + index % 3, "stream": index % 2 == 1}
        num_bytes, seconds = (0, 1, 0, 400, 0, 900)[index % 6], (0.02 if index % 4 == 0 else 0.0)
        vanish(crowded.url, {**crowded.body(index), **endless}, num_bytes, seconds)
    check_normal(crowded, wait_until)


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

"""Streams are the same however many tokens a write holds, and their waits end in time."""

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from alphabet import AlphabetEngine, ByteTokenizer
from servers import events, send_raw, serving

from runtime.core.config import Limits
from runtime.core.request import Delta
from runtime.server.app import create_app
from runtime.server.errors import ApiError
from runtime.server.serving import TimeLimits, unless_disconnected

CHAT = {"messages": [{"role": "user", "content": "Z"}]}
BODIES = {
    "completions": ("/v1/completions", {"prompt": "Z"}),
    "several prompts and answers": ("/v1/completions", {"prompt": ["Z", "A"], "n": 2, "echo": True}),
    "log-probabilities": ("/v1/completions", {"prompt": "Z", "logprobs": 2}),
    "chat": ("/v1/chat/completions", CHAT),
    "usage": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "Z"}),
}


@pytest.fixture(scope="module")
def lagging() -> Iterator[tuple[httpx.Client, Any]]:
    """A server that learns of all tokens of an answer at once."""
    engine: Any = AlphabetEngine()
    app = create_app(engine, ByteTokenizer(), "alphabet", Limits(max_model_len=100, max_requests=4))
    one_by_one = engine.generate

    async def at_once(*request: Any, **options: Any) -> AsyncGenerator[list[Delta], None]:
        yield [delta async for deltas in one_by_one(*request, **options) for delta in deltas]

    engine.generate = at_once
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client, engine


def stream_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    """Lines of a stream in order of choices, without what differs between two of them."""
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = client.post(path, json={"model": "alphabet", "stream": True, length: 5, **body})
    assert response.status_code == 200, response.text
    text = re.sub(r'"(id|item_id|created|created_at)":("[^"]*"|\d+)', "", response.text)
    return sorted(text.splitlines(), key=lambda line: re.findall(r'"choices":\[\{"index":(\d+)', line))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("fails", [False, True])
def test_tokens_that_come_together_are_the_same_events(
    api: httpx.Client, engine: Any, lagging: tuple[httpx.Client, Any], name: str, fails: bool
) -> None:
    client, late = lagging
    late.fail_after = engine.fail_after = 3 if fails else None
    if fails and "several" in name:
        pytest.skip("which answer fails first is not defined")
    assert stream_of(client, *BODIES[name]) == stream_of(api, *BODIES[name])


def test_a_failure_before_the_first_token_is_the_status(lagging: tuple[httpx.Client, Any]) -> None:
    client, late = lagging
    late.fail_after = 0
    assert client.post("/v1/completions", json={"model": "alphabet", "prompt": "Z", "stream": True}).status_code == 500


def test_tokens_that_come_together_are_written_together(lagging: tuple[httpx.Client, Any]) -> None:
    client, late = lagging
    late.fail_after = None
    with client.stream("POST", "/v1/completions", json={"model": "alphabet", "prompt": "Z", "stream": True}) as stream:
        chunks = [chunk for chunk in stream.iter_raw() if chunk]
    assert max(chunk.count(b"data: ") for chunk in chunks) > 8


def test_http_1_0_gets_a_stream_without_chunks(api: httpx.Client) -> None:
    with send_raw(api.base_url, model="alphabet", prompt="Z", stream=True) as connection:
        connection.shutdown(socket.SHUT_WR)
        chunked = b"".join(iter(lambda: connection.recv(65536), b""))
    content = b'{"model": "alphabet", "prompt": "Z", "stream": true}'
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((api.base_url.host, api.base_url.port), timeout=20) as connection:
        connection.sendall(head.encode() + content)
        plain = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"transfer-encoding" not in plain.lower()
    assert b"transfer-encoding" in chunked.lower()
    assert len(events(plain.partition(b"\r\n\r\n")[2].decode())) == 17


LIMITS = {"queue": Limits(10, queue_seconds=0.05), "request": Limits(10, request_seconds=0.05)}


@pytest.mark.parametrize(("name", "status"), [("queue", 503), ("request", 504)])
@pytest.mark.parametrize("is_late", [False, True], ids=["within the wait", "before the wait"])
def test_a_wait_ends_in_time(name: str, status: int, is_late: bool) -> None:
    async def wait() -> None:
        limits = TimeLimits(LIMITS[name])
        await asyncio.sleep(0.1 * is_late)
        with limits:
            await asyncio.sleep(60)

    with pytest.raises(ApiError) as raised:
        asyncio.run(wait())
    assert raised.value.status_code == status


def test_time_for_the_queue_ends_with_the_first_token() -> None:
    async def wait() -> bool:
        limits = TimeLimits(LIMITS["queue"])
        with limits:
            pass
        await asyncio.sleep(0.1)
        with limits:
            await asyncio.sleep(0.1)
        limits.timer.cancel()
        return limits.is_over

    assert not asyncio.run(wait())


def test_who_is_cancelled_at_the_same_time_is_cancelled() -> None:
    async def wait() -> None:
        with TimeLimits(LIMITS["queue"]):
            await asyncio.sleep(60)

    async def cancel() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


def test_the_end_of_all_tasks_is_no_disconnect() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(20)
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        answer = asyncio.create_task(unless_disconnected(receive, asyncio.sleep(20)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer

    asyncio.run(scenario())

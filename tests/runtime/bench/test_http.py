"""The load generator's HTTP client against servers that answer byte by byte, break off, or talk something else."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from compress.common.errors import ToolkitError
from runtime.bench.load import Job, Record
from runtime.bench.run import Client, closed_loop, fetch_json, open_loop, open_session, server_address

JOB = Job("/v1/completions", {"prompt": "x"})
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


def event(**payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event(choices=[{"index": 0, "text": content}], usage=None)


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": None})
DONE = b"data: [DONE]\n\n"


def chunked(content: bytes, size: int) -> list[bytes]:
    pieces = [content[i : i + size] for i in range(0, len(content), size)]
    return [STREAM_HEAD, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


@asynccontextmanager
async def answering(pieces: Sequence[bytes], seen: list[bytes] | None = None) -> AsyncIterator[str]:
    """A server that reads one request and writes these pieces."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        body = await reader.readexactly(length)
        if seen is not None:
            seen.append(head + body)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield url_of(server)


def url_of(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def send_to(address: str, timeout: float = 20) -> Record:
    async with open_session("secret") as session:
        return await Client(session, address, "m", timeout).send(JOB)


def send(pieces: Sequence[bytes], timeout: float = 20) -> Record:
    async def run() -> Record:
        async with answering(pieces) as address:
            return await send_to(address, timeout)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_streams_are_read_whatever_their_pieces(size: int) -> None:
    record = send(chunked(text("a") + text("") + text("bc") + text("d") + USAGE + DONE, size))
    assert record.error == ""
    assert record.status == 200
    assert len(record.chunk_times) == 3  # an empty text is not a token
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 5, 0)
    assert record.start <= record.chunk_times[0] <= record.chunk_times[-1] <= record.end


def test_answer_without_text_came_by_its_end() -> None:
    record = send(chunked(USAGE + DONE, 50))
    assert record.is_complete
    assert len(record.chunk_times) == 1


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b""], "ServerDisconnectedError"),
        ([b"SSH-2.0-x\r\n"], "SSH"),
        (chunked(text("a") + USAGE, 50), "the stream broke off"),
        ([STREAM_HEAD, b"ff\r\ndata"], "ClientPayloadError"),
        (chunked(text("a") + event(error={"message": "it is stopping"}) + DONE, 50), "it is stopping"),
        ([b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 31\r\n\r\n{"error":{"message":"full"}}   '], "full"),
        ([b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>oh</html>"], "<html>oh"),
        (chunked(b"data: {broken\n\n", 50), "JSONDecodeError"),
    ],
)
def test_failures_are_in_the_record(pieces: list[bytes], words: str) -> None:
    record = send(pieces)
    assert words in record.error
    assert not record.is_complete
    assert record.end >= record.start


def test_timeout_and_nobody_there() -> None:
    async def hang() -> Record:
        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        async with server:
            return await send_to(url_of(server), 0.1)

    assert "0.1 s" in asyncio.run(hang()).error
    gone = asyncio.run(send_to("http://127.0.0.1:1"))
    assert "ClientConnectorError" in gone.error
    assert gone.status == 0


def test_request_says_who_it_is_and_what_it_wants() -> None:
    seen: list[bytes] = []

    async def run() -> None:
        async with answering(chunked(DONE, 50), seen) as address:
            await send_to(address)

    asyncio.run(run())
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(body) == {"prompt": "x", "model": "m", "stream": True, "stream_options": {"include_usage": True}}


def test_whole_answers_of_either_kind() -> None:
    async def run(pieces: list[bytes]) -> object:
        async with answering(pieces) as address, open_session() as session:
            return await fetch_json(session, "POST", address, {})

    assert asyncio.run(run([b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n[1", b"2]"])) == [12]
    assert asyncio.run(run([b"HTTP/1.1 200 OK\r\n\r\n[1", b"2]"])) == [12]


def test_json_or_a_refusal_that_says_why() -> None:
    async def run(pieces: list[bytes]) -> object:
        async with answering(pieces) as address:
            return await fetch(f"{address}/x")

    async def fetch(url: str) -> object:
        async with open_session() as session:
            return await fetch_json(session, "POST", url, {})

    assert asyncio.run(run([b"HTTP/1.1 200 OK\r\n\r\n{}"])) == {}
    with pytest.raises(ToolkitError, match=r"401.*--api-key"):
        asyncio.run(run([b"HTTP/1.1 401 X\r\n\r\nno"]))
    with pytest.raises(ToolkitError, match=r"127\.0\.0\.1:1\b.*--url"):
        asyncio.run(fetch("http://127.0.0.1:1/x"))


def test_addresses() -> None:
    assert server_address("http://h:8000/v1/") == "http://h:8000"
    assert server_address("https://h/a/v1") == "https://h/a"
    assert server_address("http://[::1]:80") == "http://[::1]:80"
    for url in ("h:8000", "ftp://h", "http://", ""):
        with pytest.raises(ToolkitError, match=f"^{url!r} .*--url"):
            server_address(url)


class WaitingClient(Client):
    """Answers without a network, and only once this many requests are in flight."""

    waits_for: int

    async def _stream(self, job: Job, record: Record) -> None:
        record.status = 200
        record.chunk_times.append(self.now)
        async with asyncio.timeout(60):
            await asyncio.sleep(0.001)
            while self.peak_active < self.waits_for:
                await asyncio.sleep(0.001)


def test_closed_loop_never_has_more_under_way() -> None:
    client, done = WaitingClient(None, "", "m"), []
    client.waits_for = 3
    records = asyncio.run(closed_loop(client, [JOB] * 10, 3, done.append))
    assert client.peak_active == 3
    assert len(records) == len(done) == 10
    assert client.num_active == 0


def test_open_loop_waits_for_nobody_and_counts_from_the_due_time() -> None:
    client = WaitingClient(None, "", "m")
    client.waits_for = 5
    arrivals = [0.0, 0.005, 0.01, 0.015, 0.2]
    records = asyncio.run(open_loop(client, [JOB] * 5, arrivals, lambda record: None))
    assert client.peak_active == 5
    starts = [record.start - records[0].start for record in records]
    assert starts == pytest.approx(arrivals)
    assert records[0].e2e >= 0.2, "it was answered when the last had come"

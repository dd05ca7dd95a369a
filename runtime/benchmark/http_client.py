"""Just enough HTTP/1.1 for a load generator: one connection per request, bodies as they arrive, nothing between."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from compress.checkpoint.errors import ToolkitError

READ_BYTES = 2**16
LONGEST_LINE = 2**20


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and the key it asks for."""

    host: str
    port: int
    is_https: bool = False
    prefix: str = ""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Address:
        """Of `http://host:port`, with or without a path and a final `/v1`. Raises ToolkitError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ToolkitError(f"{url!r} is no URL of a server", "Write for example --url http://127.0.0.1:8000")
        is_https = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if is_https else 80), is_https, prefix, api_key)


@dataclass(frozen=True, slots=True)
class Response:
    """Status and headers (names in lower case) of an answer whose body may still be under way."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives. Raises asyncio.IncompleteReadError when the server breaks off."""
        reader = self.reader
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int((await reader.readline()).partition(b";")[0] or b"x", 16):
                yield await reader.readexactly(size)
                await reader.readline()
        elif "content-length" in self.headers:
            yield await reader.readexactly(int(self.headers["content-length"]))
        else:
            while piece := await reader.read(READ_BYTES):
                yield piece

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Data of server-sent events, as soon as each is complete."""
        rest = b""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in events:
                    if event.startswith(b"data:"):
                        yield event.removeprefix(b"data:").strip()


@asynccontextmanager
async def request(address: Address, method: str, path: str, payload: Any = None) -> AsyncIterator[Response]:
    """Sends a request and gives the answer's beginning; the connection ends with the block.

    Raises:
        OSError: no connection. ValueError, asyncio.IncompleteReadError: what came back is no HTTP.
    """
    context = ssl.create_default_context() if address.is_https else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=LONGEST_LINE)
    try:
        writer.write(_head_and_body(address, method, path, payload))
        await writer.drain()
        status = await _read_status(reader)
        yield Response(status, await _read_headers(reader), reader)
    finally:
        writer.close()


async def fetch_json(address: Address, method: str, path: str, payload: Any = None) -> Any:
    """The JSON of a whole answer. Raises ToolkitError when there is no server, or it refuses."""
    where = f"{address.host}:{address.port}"
    try:
        async with request(address, method, path, payload) as response:
            body = await response.body()
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        raise ToolkitError(f"no answer from {where}: {error}", "Start the server, or mend --url") from error
    if response.status != 200:
        detail = body[:200].decode(errors="replace")
        raise ToolkitError(f"{method} {path} on {where} gave status {response.status}: {detail}", "Check --api-key")
    return json.loads(body)


def _head_and_body(address: Address, method: str, path: str, payload: Any) -> bytes:
    body = b"" if payload is None else json.dumps(payload).encode()
    lines = [
        f"{method} {address.prefix}{path} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if address.api_key is not None:
        lines.append(f"Authorization: Bearer {address.api_key}")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1") + body


async def _read_status(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line.startswith(b"HTTP/1."):
        raise ValueError(f"the server's answer begins with {line[:40]!r}" if line else "the server gave no answer")
    return int(line.split()[1])


async def _read_headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers

"""Middleware that checks requests before a route handles them, and time limits on reading them.

Plain ASGI, so streams pass unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from uuid import uuid4

import h11
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compress.common.cli import tool_version
from runtime.engine.metrics import PREFIX
from runtime.server.errors import CLIENT_CLOSED_REQUEST, ApiError, error_response
from runtime.server.half_closed import HalfClosedProtocol
from runtime.server.keys import ApiKeys, TokenCount
from runtime.server.page import PAGE_PATHS

logger = logging.getLogger("runtime.server")

QUIET_PATHS = frozenset({"/health", "/metrics"})
CLOSE = {"Connection": "close"}
OPEN_PATHS = PAGE_PATHS | {"/health"}


class ApiKeyGuard:
    """Requires a key, except for health checks and the page, and keeps the limits of each key.

    It comes as `Authorization: Bearer KEY` or `x-api-key: KEY`.
    Sets `request.state.account`, and `request.state.key_name` to its name.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self.app = app
        self.keys = keys
        self.clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        named = headers.get("x-api-key")  # as clients of Anthropic's API send it
        account = self.keys.find(f"Bearer {named}" if named else headers.get("authorization", ""))
        if account is None:
            message = "Missing or incorrect API key. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            response = error_response(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        scope["state"] |= {"account": account, "key_name": account.name}
        try:
            if scope["method"] not in ("GET", "HEAD"):
                account.start_request(self.clock())
        except ApiError as refusal:
            await refusal.response()(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            account.charge(scope["state"]["tokens"], self.clock())


class SiteGuard:
    """Refuses requests of other sites' pages, which run in the browser of a user who can connect to this server.

    Such a page may send simple requests (its `Origin` differs from our `Host`), or point its own name to this server's
    address (DNS rebinding: the `Host` is not ours). Clients other than browsers send no `Origin`, and no `Host` in
    HTTP/1.0, which browsers always send.

    Args:
        hosts: allowed host names; empty allows any. Pages of these hosts may use the server.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app = app
        self.hosts = frozenset(name.lower() for name in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (message := self.objection(Headers(scope=scope))):
            await error_response(403, message, code="foreign_site")(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def objection(self, headers: Headers) -> str:
        """Returns the reason for a refusal with a remedy, or an empty string."""
        host, origin = headers.get("host"), headers.get("origin")
        if self.hosts and host is not None and parts(f"//{host}").hostname not in self.hosts:
            return f"This server is not called {host!r}. Start it with --allowed-host NAME to permit a name."
        if origin is None or parts(origin).netloc == host or parts(origin).hostname in self.hosts:
            return ""
        return f"Pages of {origin} may not use this server. Start it with --allowed-host NAME to permit a host."


def origins_of(hosts: Collection[str]) -> str:
    """Returns a regular expression for the origins of pages of these hosts, on any port."""
    names = (re.escape(f"[{name}]" if ":" in name else name) for name in hosts)
    return rf"(?i:https?://({'|'.join(names)})(:\d+)?)"


def parts(url: str) -> SplitResult:
    """Returns the parts of a URL; all empty if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class BodyLimit:
    """Answers 413 to bodies longer than `max_bytes`, with or without a stated length, 408 to bodies that are not
    complete within `seconds`, and 415 to compressed ones, whose length says little."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if error := self.objection(Headers(scope=scope)):
            await error.response()(scope, receive, send)
        else:
            await self.app(scope, self.counting(receive), send)

    def objection(self, headers: Headers) -> ApiError | None:
        """Returns the error for a body that need not be read."""
        encodings = ",".join(headers.getlist("content-encoding")).lower()
        if compressed := {name.strip() for name in encodings.split(",")} - {"", "identity"}:
            message = f"The body is sent in the encoding '{min(compressed)}'. Send it uncompressed."
            return ApiError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})
        return self.refusal() if int(headers.get("content-length", "0")) > self.max_bytes else None

    def counting(self, receive: Receive) -> Receive:
        """Wraps `receive` to raise ApiError: 413 once the body is too long, 408 if it is late."""
        num_bytes = 0
        deadline: float | None = asyncio.get_running_loop().time() + self.seconds

        async def counted() -> Message:
            nonlocal num_bytes, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"The body was not complete after {self.seconds:g} s."
                raise ApiError(408, late, code="body_timeout", headers=CLOSE) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise self.refusal()
            if not message.get("more_body", False):
                deadline = None  # the next message is the client's disconnect, at any time
            return message

        return counted

    def refusal(self) -> ApiError:
        message = f"The body is longer than {self.max_bytes} bytes. Send less."
        return ApiError(413, message, code="body_too_large", headers=CLOSE)


class HeadAsGet:
    """Answers HEAD wherever GET is answered. The connection leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        await self.app(as_get, receive, send)
        scope["route"] = as_get.get("route")  # for the log and the metrics


class RequestBody:
    """The body of a request as it is received.

    Attributes:
        is_read: nothing is left of it.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self.is_read = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self.is_awaited = headers.get("expect", "").lower() == "100-continue"
        self._receive = receive

    async def receive(self) -> Message:
        self.is_awaited = False
        message = await self._receive()
        self.is_read = not message.get("more_body", False)
        return message

    async def discard(self, seconds: float) -> None:
        """Reads the rest for at most some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_read:
                    await self.receive()


ARRIVAL_SECONDS = 0.05
"""Most time between the head and the body of a small request, which need not cost its connection."""
LINGER_SECONDS = 2


class ConnectionEnd:
    """States `Connection: close` where a connection ends: when the server stops, and when an answer leaves a part of
    the body unread.

    The rest of such a body is discarded for up to `LINGER_SECONDS`. Closing a socket with unread bytes resets the
    connection, and the client might lose the answer.
    """

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self.app = app
        self.is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = RequestBody(scope, receive)

        async def send_and_end(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not (body.is_read or body.is_awaited):
                    await body.discard(ARRIVAL_SECONDS)
                if self.is_draining() or not body.is_read:
                    MutableHeaders(scope=message)["connection"] = "close"
            elif not (body.is_read or message.get("more_body", False)):
                await send({**message, "more_body": True})
                await body.discard(LINGER_SECONDS)
                message = {"type": "http.response.body"}
            await send(message)

        await self.app(scope, body.receive, send_and_end)


class RequestId:
    """Sets `request.state.request_id` and returns it as header `x-request-id`, also of errors. Sets
    `request.state.tokens`, where the request's tokens are counted."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, tokens=TokenCount())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


METHODS = ("GET", "HEAD", "POST", "OPTIONS")


class ServerMetrics(Collector):
    """Metrics of the process and of its HTTP requests. No client can add labels: they are known routes and keys."""

    def __init__(self, model_name: str) -> None:
        self.build = {"version": tool_version(), "model": model_name}
        self.num_requests: Counter[tuple[str, ...]] = Counter()
        self.num_tokens: Counter[tuple[str, ...]] = Counter()
        self.num_routed: Counter[tuple[str, ...]] = Counter()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count(self, scope: Scope, status: int) -> None:
        """Counts a request that ended."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.num_requests[method, getattr(scope.get("route"), "path", "unknown"), str(status)] += 1
        if key_name := scope["state"].get("key_name"):
            self.num_tokens[key_name,] += scope["state"]["tokens"].total

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(f"{PREFIX}build", "Version of the toolkit and name of the model.", self.build)
        labels, text = ("method", "route", "status"), "HTTP requests ended; 499: the client left before the answer."
        yield _counts(f"{PREFIX}http_requests_total", text, labels, self.num_requests)
        text, labels = (
            "Requests to virtual models, by the model that answers and why.",
            ("route", "model_name", "reason"),
        )
        yield _counts(f"{PREFIX}routed_requests_total", text, labels, self.num_routed)
        yield _counts(f"{PREFIX}api_key_tokens_total", "Tokens of prompts and answers.", ("key",), self.num_tokens)

    def render(self) -> str:
        """Renders Prometheus' text format."""
        return generate_latest(self.registry).decode()


def _counts(name: str, text: str, labels: Sequence[str], counts: Counter[tuple[str, ...]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family


class AccessLog:
    """Logs a line per request when it ends, at level debug for `QUIET_PATHS`, and counts it in `metrics`."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), CLIENT_CLOSED_REQUEST

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            status = 500  # the server's outermost layer answers so
            raise
        finally:
            self.metrics.count(scope, status)
            self.log(scope, status, time.perf_counter() - start)

    def log(self, scope: Scope, status: int, seconds: float) -> None:
        """Logs the key's name or the address, the path without its query, tokens of prompt and answer, and the user."""
        state, level = scope["state"], logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        client = state.get("key_name") or (scope["client"] or ["-"])[0]
        what = (state["request_id"], client, scope["method"], quote(scope["path"]), status, 1000 * seconds)
        tokens, user = state["tokens"], state.get("user")
        more = f", {tokens.prompt}+{tokens.output} tokens" if tokens.total else ""
        more += f", user {user!r:.100}" if user else ""
        logger.log(level, "request %s: %.100s %s %.200s %d in %.0f ms%s", *what, more)


WRITE_PIECE = "runtime.write_piece"
SEND_BUFFER_BYTES = 2**18
IDLE_SECONDS = 75
"""Idle time between two requests of a connection before it is closed. It exceeds that of clients (httpx: 5 s), because
a request that is sent while the server closes the connection fails."""


class StrictConnection(h11.Connection):
    """HTTP/1.1 connection that refuses a request whose end a proxy in front of it may see elsewhere, which would let a
    client smuggle in another. h11 itself refuses unknown or repeated transfer encodings and different lengths."""

    def next_event(self) -> Any:
        """Returns the next event. Raises `h11.RemoteProtocolError` for a chunked body of HTTP/1.0, or with a length."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")
        return event


class ReadTimeoutProtocol(HalfClosedProtocol):
    """uvicorn's HTTP/1.1 protocol with time limits for the client.

    Aborts the connection if the client takes too long to send the head of a request or to read the answer. uvicorn
    limits only the pause between two requests, and a socket closed with unread bytes stays open until its client closes
    it.

    Unread data takes little memory: the transport's buffer (64 KiB) and the kernel's, limited here to
    `SEND_BUFFER_BYTES`. A client may be slow as long as it continues to read.

    Applications find `write_piece` under `WRITE_PIECE` in the extensions of a scope.

    Args:
        client_seconds: time from the start of the connection, or from the first byte of a further request, to the end
            of the head; and time for the client to read while all buffers are full.
        options: options of uvicorn's protocol.
    """

    def __init__(self, *, client_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.conn = StrictConnection(h11.SERVER)
        self.client_seconds = client_seconds
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.app = partial(self.extend, self.app)

    async def extend(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {WRITE_PIECE: self.write_piece}
        await app(scope, receive, send)

    async def write_piece(self, piece: bytes) -> None:
        """Writes a piece of a body that has begun. Waits while the client does not read.

        The layers of the application, and h11, would cost several times as much as the token of a stream.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        if piece and not self.cycle.disconnected:  # an empty chunk would end the body
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.is_chunked else piece)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # asyncio does so for sockets that name their protocol, which accepted ones do not. Without it the body of an
        # answer, and every event of a stream, waits until the client confirms the last packet: 40 ms on Linux.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.expect("head")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self.expect("head")
        else:
            self.met("head")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Data that followed the last request may be the start of the next one; no further bytes may announce it.
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.expect("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self.expect("reading")

    def resume_writing(self) -> None:
        self.met("reading")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP in JSON; only ends the connection if it already has an answer."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = error_response(400, msg)
        headers = [*body.raw_headers, (b"connection", b"close")]
        answer = (h11.Response(status_code=400, headers=headers), h11.Data(data=bytes(body.body)), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in answer))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.met("head")
        self.met("reading")
        super().connection_lost(exc)

    def expect(self, what: str) -> None:
        """Aborts the connection unless `met` is called in time."""
        if what not in self.timers:
            self.timers[what] = self.loop.call_later(self.client_seconds, self.give_up, what)

    def give_up(self, what: str) -> None:
        if what == "reading":
            logger.warning("a client did not read its answer for %g s: closed", self.client_seconds)
        self.transport.abort()

    def met(self, what: str) -> None:
        """Cancels the timer of `expect`."""
        if timer := self.timers.pop(what, None):
            timer.cancel()

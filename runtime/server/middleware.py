"""Middleware that checks requests before a route handles them. Plain ASGI, so streams pass unchanged."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.errors import ApiError, error_response
from runtime.server.page import PAGE_PATHS

OPEN_PATHS = PAGE_PATHS | {"/health"}


class ApiKeyGuard:
    """Requires `Authorization: Bearer KEY`, except for health checks and the page."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self.allows(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        message = "Missing or incorrect API key. Send it as 'Authorization: Bearer KEY'."
        response = error_response(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def allows(self, headers: Headers) -> bool:
        given = headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, self.expected)


class SiteGuard:
    """Refuses requests of other sites' pages, which run in the browser of a user who can connect to this server.

    Such a page may send simple requests (its `Origin` differs from our `Host`), or point its own name to this server's
    address (DNS rebinding: the `Host` is not ours). Clients other than browsers send no `Origin`.

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
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts and parts(f"//{host}").hostname not in self.hosts:
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
    """Answers 413 to bodies longer than `max_bytes`, with or without a stated length, and 408 to bodies that are not
    complete within `seconds`."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if int(Headers(scope=scope).get("content-length", "0")) > self.max_bytes:
            refusal = self.refusal()
            response = error_response(refusal.status_code, refusal.detail, code=refusal.code)
            await response(scope, receive, send)
            return
        await self.app(scope, self.counting(receive), send)

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
                raise ApiError(408, late, code="body_timeout", headers={"Connection": "close"}) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise self.refusal()
            if not message.get("more_body", False):
                deadline = None  # the next message is the client's disconnect, at any time
            return message

        return counted

    def refusal(self) -> ApiError:
        return ApiError(413, f"The body is longer than {self.max_bytes} bytes. Send less.", code="body_too_large")


class RequestId:
    """Sets `request.state.request_id` and returns it as header `x-request-id`, also of errors."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)

"""What is refused before a route sees it: wrong keys and too long bodies. Plain ASGI, so streams pass untouched."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health"})


class ApiKeyGuard:
    """Asks for `Authorization: Bearer KEY`, except for health checks."""

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


class BodyLimit:
    """Answers 413 to bodies longer than `max_bytes`, whether or not they state their length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

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
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise self.refusal()
            return message

        return counted

    def refusal(self) -> ApiError:
        return ApiError(413, f"The body is longer than {self.max_bytes} bytes. Send less.", code="body_too_large")

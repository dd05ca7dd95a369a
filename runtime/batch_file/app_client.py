"""Requests to an ASGI application in this process: the server's own checks and answers, without a socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

HOST = b"127.0.0.1"


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)

    def json(self) -> Any:
        return json.loads(self.content)


async def post(app: ASGIApp, path: str, body: dict[str, Any]) -> Answer:
    """Posts JSON and waits for the whole answer. A client that never leaves: cancelling the task is how to stop it."""
    content = json.dumps(body).encode()
    answer = Answer()
    requests = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> Message:
        for message in requests:
            return message
        return await asyncio.Future()  # nothing more comes

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer.content += message.get("body", b"")

    await app(_scope(path, len(content)), receive, send)
    return answer


def _scope(path: str, length: int) -> dict[str, Any]:
    headers = {b"host": HOST, b"content-type": b"application/json", b"content-length": str(length).encode()}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers.items()),
        "client": (HOST.decode(), 0),
        "server": (HOST.decode(), 80),
        "state": {},
    }

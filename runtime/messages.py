"""What asyncio tasks and the engine's thread send each other: plain dataclasses over queues."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from compress.checkpoint.errors import RequestError
from runtime.sampling_params import SamplingParams
from runtime.types import Delta, FinishReason, RequestOptions


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine will say no more about a request, and why."""

    reason: FinishReason
    error: str


@dataclass(eq=False, slots=True)
class Inbox:
    """Where the answers of one request go.

    Attributes:
        loop: the event loop that `queue` belongs to.
        num_unfinished: answers that the engine has not ended; the engine's thread counts.
        timer: looks for stalls; the event loop's.
    """

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta | Lost | RequestError]
    num_unfinished: int
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    options: RequestOptions
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget the request that answers into an inbox; nobody listens to it any more."""

    request_id: str
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread: at once, or when all requests have ended."""

    when_idle: bool


Mail = list[tuple[asyncio.Queue, Delta | Lost | RequestError]]
"""Items, and the queue that each goes to."""


def post(loop: asyncio.AbstractEventLoop, mail: Mail) -> bool:
    """Puts items into queues of an event loop from another thread. False when that loop has been closed."""
    try:
        loop.call_soon_threadsafe(_put_all, mail)
    except RuntimeError:
        return False
    return True


def _put_all(mail: Mail) -> None:
    for queue, item in mail:
        queue.put_nowait(item)

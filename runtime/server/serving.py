"""The served model: a bounded queue before the engine, time limits, and answers from the deltas of the engine.

A client that disconnects frees its request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from compress.common.errors import sentences
from runtime.core.config import Limits
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.core.token_rules import NOTHING_ALLOWED
from runtime.engine.engine_thread import Health
from runtime.engine.output_processor import GRAMMAR_TOO_COMPLEX
from runtime.server.answers import Answer, ChoicesAnswer, Deltas, Shape, blocks, chain
from runtime.server.errors import RETRY_LATER, ApiError, JsonResponse, aborted
from runtime.server.intake import Intake, ServedText, Tokenizer
from runtime.server.keys import Account
from runtime.server.protocol.field_warnings import warning_headers
from runtime.server.protocol.generation import Delivery, too_many_answers
from runtime.server.response_models import json_pieces

logger = logging.getLogger("runtime.server")

T = TypeVar("T")


class Engine(Protocol):
    """The engine's thread as the server uses it. Closing the generator frees the request."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None,
        options: RequestOptions,
    ) -> AsyncGenerator[Delta, None]: ...

    def start(self) -> None: ...

    def stop(self) -> object: ...

    def check(self) -> Health: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its sampling parameters and serving options."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    options: RequestOptions


def client_of(request: Request) -> str:
    """Names who asks: the holder of the API key, else the peer's address, else this request alone."""
    if key_name := getattr(request.state, "key_name", ""):
        return key_name
    return request.client.host if request.client else request.state.request_id


def places_left(limit: int, held: int, total: int) -> int:
    """Returns how many more places in the queue a client may take.

    A client may hold as many as it leaves free for others, of `2 * limit`: `limit` if it is alone, and however many
    others hold, half of what is free for the next one. So one client alone never fills the queue for others.

    Args:
        limit: most places of one client.
        held: places that it holds.
        total: places that all hold.
    """
    return max(0, (2 * limit - total - held + 1) // 2)


CAUSED_BY_REQUEST = {
    GRAMMAR_TOO_COMPLEX: "Simplify the grammar",
    NOTHING_ALLOWED: "Allow more tokens: see allowed_token_ids, bad_words and the grammar",
}
"""Remedies of errors that other requests would not have had."""


def check_delta(delta: Delta) -> None:
    """Raises ApiError for a failed (400 or 500) or aborted (503) request."""
    if delta.finish_reason is FinishReason.ERROR:
        if remedy := CAUSED_BY_REQUEST.get(delta.error):
            raise ApiError(400, f"Generation stopped: {delta.error}. {remedy}.", code="refused")
        logger.error("request %s failed: %s", delta.request_id, delta.error)
        raise ApiError(500, sentences(f"Generation failed: {delta.error}"), code="generation_failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise aborted()


async def in_time(
    deltas: AsyncGenerator[tuple[int, Delta], None], limits: Limits
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yields the deltas while the first and the last of them are in time. Closing it closes them.

    Raises:
        ApiError: 503 or 504.
    """
    now = asyncio.get_running_loop().time()
    end = now + limits.request_seconds
    deadline = min(end, now + limits.queue_seconds)
    async with aclosing(deltas):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(deltas)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise out_of_time(limits, is_first=deadline < end) from None
            yield item
            deadline = end


def out_of_time(limits: Limits, is_first: bool) -> ApiError:
    """Returns the error 503 for a request without a first token, 504 for one in progress."""
    if is_first:
        message = f"No token after {limits.queue_seconds:g} s: the server is overloaded. Try again later."
        return ApiError(503, message, code="queue_timeout", headers=RETRY_LATER)
    message = f"The request took longer than {limits.request_seconds:g} s. Ask for fewer tokens."
    return ApiError(504, message, code="request_timeout")


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Interleaves streams in order of arrival. Closing it closes them all."""
    if len(streams) == 1:  # the common case, without a task and a queue per token
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
        return
    arrivals: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, stream, arrivals)) for index, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            index, item = await arrivals.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: AsyncGenerator[Delta, None], arrivals: asyncio.Queue) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                arrivals.put_nowait((index, delta))
        arrivals.put_nowait((index, None))
    except Exception as error:
        arrivals.put_nowait((index, error))


class EventStream(StreamingResponse):
    """A response of server-sent events that closes its deltas, however it ends.

    A client that does not read for `client_seconds` is disconnected: otherwise its request would occupy the queue, and
    its text memory, indefinitely.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deltas: Deltas, client_seconds: float) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.events = events
        self.deltas = deltas
        self.client_seconds = client_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self.client_seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            logger.warning("a client did not read its stream for %g s: closed", self.client_seconds)
        finally:
            await self.events.aclose()
            await self.deltas.aclose()  # a generator that was never started does not close its argument


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(until_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def account_of(request: Request) -> Account:
    """Returns the account of the request's API key; a new one without limits if the server asks for none."""
    return getattr(request.state, "account", None) or Account("")


class Service:
    """The served model: answers requests on the engine within `limits`. Used on the event loop's thread.

    Attributes:
        places: places in the queue by client.
        turns: lock of long answers, of which one is written at a time.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model_name: str,
        limits: Limits,
        render_metrics: Callable[[], str],
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.limits = limits
        self.render_metrics = render_metrics
        self.intake = Intake(ServedText(tokenizer, model_name, limits))
        self.places: Counter[str] = Counter()
        self.turns = asyncio.Lock()

    async def respond(
        self,
        request: Request,
        body: Delivery,
        shape: Shape,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
    ) -> Response:
        """Generates `n` choices per prompt and answers in the form of OpenAI's API; see `deliver`."""
        request_id = f"{shape.id_prefix}-{request.state.request_id}"
        envelope = {"id": request_id, "created": int(time.time()), "model": self.model_name}
        num_choices = len(prompts) * body.num_answers
        answer = ChoicesAnswer(envelope, shape, num_choices, self.turns, body.include_usage)
        return await self.deliver(request, request_id, body, answer, prompts, samplings)

    async def deliver(
        self,
        request: Request,
        request_id: str,
        body: Delivery,
        answer: Answer,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
    ) -> Response:
        """Generates `n` choices per prompt and answers, as one body or as a stream.

        If the engine refuses the request, raises before the first byte of a stream.
        """
        options = RequestOptions(priority=body.priority, cache_salt=body.cache_salt)
        jobs = [Job(f"{request_id}-{i}", *job, options) for i, job in enumerate(zip(prompts, samplings, strict=True))]
        logger.debug("request %s: prompts of %s tokens", request_id, [len(p) for p in prompts])
        request.state.user = body.user
        deltas = self.run(jobs, request)
        if body.stream:
            first = await unless_disconnected(request, anext(deltas))
            response: Response = EventStream(answer.events(first, deltas), deltas, self.limits.client_seconds)
        else:
            response = await self.respond_at_once(request, answer.whole(deltas))
        for text in (warned := warning_headers(body.warnings)).values():
            logger.info("request %s: not followed: %s", request_id, text)
        response.headers.update(warned)
        return response

    async def respond_at_once(self, request: Request, body: Awaitable[Mapping[str, Any]]) -> Response:
        """Returns an answer that is not streamed. A long one is written while it is sent, without `Content-Length`.

        Raises:
            ClientDisconnect: the client disconnected first.
        """
        written = blocks(json_pieces(await unless_disconnected(request, body)), self.turns)
        first = await anext(written)
        second = await anext(written, None)
        if second is None:
            return Response(first, media_type=JsonResponse.media_type)
        return StreamingResponse(chain(first, chain(second, written)), media_type=JsonResponse.media_type)

    @contextmanager
    def admit(self, count: int, client: str) -> Iterator[None]:
        """Holds `count` places in the queue. Raises ApiError: 429 if it is full, 400 if `count` exceeds its size."""
        limit, held, total = self.limits.max_requests, self.places[client], self.places.total()
        if count > limit:
            raise too_many_answers(count, limit)
        if count > (left := places_left(limit, held, total)):
            raise ApiError(
                429,
                f"The queue is full: of {total} requests running or waiting {held} are yours, and there is room for "
                f"{left} more of yours. Try again later.",
                code="queue_full",
                headers=RETRY_LATER,
            )
        self.places[client] += count
        try:
            yield
        finally:
            self.places -= Counter({client: count})  # forgets clients without any

    async def run(self, jobs: list[Job], request: Request) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields deltas of all jobs as they arrive, with the index of their choice, in order of prompts and answers.

        Closing it frees all jobs. Counts tokens in `request.state.tokens`.

        Raises:
            ApiError: 429 if the queue or the places of the key are full; 500 if a sequence fails; 503 if the engine
                stops, or returns no token within `queue_seconds`; 504 after `request_seconds`.
            RequestError: the engine refuses a job.
        """
        count, tokens = sum(job.sampling.n for job in jobs), request.state.tokens
        client = client_of(request) if self.limits.fair else ""
        with self.admit(count, client), account_of(request).hold(count):
            tokens.prompt += sum(len(job.prompt_token_ids) for job in jobs)
            streams = [
                self.engine.generate(
                    job.prompt_token_ids, job.sampling, job.request_id, options=replace(job.options, client=client)
                )
                for job in jobs
            ]
            async with aclosing(in_time(merge(streams), self.limits)) as deltas:
                async for index, delta in deltas:
                    check_delta(delta)
                    tokens.output += len(delta.token_ids)
                    yield index * jobs[index].sampling.n + delta.index, delta

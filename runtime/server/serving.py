"""The served model: a bounded queue before the engine, time limits, and answers from the deltas of the engine.

A client that disconnects frees its request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from compress.common.errors import sentences
from runtime.core.config import Limits
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.core.token_rules import NOTHING_ALLOWED
from runtime.engine.engine_client import EngineClient, Health, join_health
from runtime.engine.output_processor import GRAMMAR_TOO_COMPLEX
from runtime.routing.routes import Routes
from runtime.server.answers import Answer, ChoicesAnswer, Deltas, Shape, blocks, chain
from runtime.server.cascade import ConfidenceGate
from runtime.server.errors import RETRY_LATER, ApiError, JsonResponse, aborted
from runtime.server.intake import Intake, ServedText
from runtime.server.keys import Account
from runtime.server.middleware import WRITE_PIECE
from runtime.server.protocol.field_warnings import warning_headers
from runtime.server.protocol.generation import Delivery, too_many_answers
from runtime.server.response_models import json_pieces
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger("runtime.server")

T = TypeVar("T")


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


FAILURES = frozenset({FinishReason.ERROR, FinishReason.ABORT})


def failure_of(delta: Delta) -> ApiError:
    """Returns the error of a failed (400 or 500) or aborted (503) request."""
    if delta.finish_reason is FinishReason.ABORT:
        return aborted()
    if remedy := CAUSED_BY_REQUEST.get(delta.error):
        return ApiError(400, f"Generation stopped: {delta.error}. {remedy}.", code="refused")
    logger.error("request %s failed: %s", delta.request_id, delta.error)
    return ApiError(500, sentences(f"Generation failed: {delta.error}"), code="generation_failed")


class TimeLimits:
    """Limits on the waits of a request: one within `with` ends with ApiError, 503 until the first delta and 504 after
    it, once the time is over.

    All waits share a timer: one for each would cost more than a delta.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.loop = limits, asyncio.get_running_loop()
        self.task: asyncio.Task[object] | None = None
        self.is_over, self.has_cancelled, self.is_first = False, False, True
        now = self.loop.time()
        self.end = now + limits.request_seconds
        self.timer: asyncio.Handle = self.loop.call_at(min(self.end, now + limits.queue_seconds), self.ring)

    def ring(self) -> None:
        self.is_over = True
        if self.task is not None:
            self.has_cancelled = self.task.cancel()

    def __enter__(self) -> None:
        self.task = asyncio.current_task()
        if self.is_over:  # what need not be waited for is still returned
            self.timer = self.loop.call_soon(self.ring)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self.task = self.task, None
        if self.has_cancelled and task is not None and not task.uncancel() and kind is asyncio.CancelledError:
            is_queued = self.is_first and self.limits.queue_seconds < self.limits.request_seconds
            raise out_of_time(self.limits, is_queued) from None
        if self.is_first:
            self.is_first = self.is_over = False
            self.timer.cancel()
            self.timer = self.loop.call_at(self.end, self.ring)


def out_of_time(limits: Limits, is_first: bool) -> ApiError:
    """Returns the error 503 for a request without a first token, 504 for one in progress."""
    if is_first:
        message = f"No token after {limits.queue_seconds:g} s: the server is overloaded. Try again later."
        return ApiError(503, message, code="queue_timeout", headers=RETRY_LATER)
    message = f"The request took longer than {limits.request_seconds:g} s. Ask for fewer tokens."
    return ApiError(504, message, code="request_timeout")


async def merge(streams: Sequence[Deltas], num_answers: int) -> Deltas:
    """Interleaves streams of `num_answers` answers each in order of arrival, and numbers all answers. Closing it closes
    them all."""
    arrivals: asyncio.Queue[list[Delta] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, arrivals, num_answers * i)) for i, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            item = await arrivals.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: Deltas, arrivals: asyncio.Queue[list[Delta] | Exception | None], first_index: int) -> None:
    try:
        async with aclosing(stream):
            async for deltas in stream:
                for delta in deltas:
                    delta.index += first_index
                arrivals.put_nowait(deltas)
        arrivals.put_nowait(None)
    except Exception as error:
        arrivals.put_nowait(error)


class EventStream(StreamingResponse):
    """A response of server-sent events, which are written together for all deltas that arrived meanwhile.

    It begins with the first deltas, so that an error before them is an answer of its own. Closes its deltas, however it
    ends. Once it has begun, its events pass no layer of the application: the connection writes them.

    Args:
        turns: lock of all long answers; see `blocks`.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, deltas: Deltas, turns: asyncio.Lock) -> None:
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.answer, self.deltas, self.turns = answer, deltas, turns
        self.first: list[Delta] | None = None

    async def read_first(self, receive: Receive) -> None:
        """Waits for the first deltas before the answer begins. Raises the errors before them, and ClientDisconnect."""
        try:
            self.first = await unless_disconnected(receive, anext(self.deltas))
        finally:
            if self.first is None:
                await self.deltas.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = scope.get("extensions", {}).get(WRITE_PIECE) or partial(send_piece, send)
        try:
            await unless_disconnected(receive, self.write_events(send, write))
            await send({"type": "http.response.body"})
        except ClientDisconnect:
            return
        finally:
            await self.deltas.aclose()

    async def write_events(self, send: Send, write: Callable[[bytes], Awaitable[None]]) -> None:
        first = await anext(self.deltas) if self.first is None else self.first
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        begun, unsent, num_open = set[int](), self.answer.begin(first[0]), self.answer.num_choices
        deltas: list[Delta] | None = first
        try:
            while deltas is not None:
                for delta in deltas:
                    if delta.index not in begun:
                        begun.add(delta.index)
                        async for piece in blocks(self.answer.prelude(delta), self.turns):
                            if piece:
                                await write(unsent + piece)
                                unsent = b""
                unsent = b"".join([unsent, *map(self.answer.write, deltas)])
                num_open -= sum(delta.finish_reason is not None for delta in deltas)
                if num_open:  # the last deltas are written with the end
                    await write(unsent)
                    unsent = b""
                deltas = await anext(self.deltas, None)
        except ApiError as error:
            await write(unsent + self.answer.end(error))
        else:
            await write(unsent + self.answer.end(None))


async def send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    task = cast("asyncio.Task[object]", asyncio.current_task())
    watcher = asyncio.create_task(until_disconnected(receive))
    has_cancelled = False

    def cancel(watcher: asyncio.Task[None]) -> None:
        nonlocal has_cancelled
        if not watcher.cancelled():  # as the end of all tasks cancels it too
            has_cancelled = task.cancel()

    watcher.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if has_cancelled and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.remove_done_callback(cancel)
        watcher.cancel()


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def account_of(request: Request) -> Account:
    """Returns the account of the request's API key; a new one without limits if the server asks for none."""
    return getattr(request.state, "account", None) or Account("")


class Service:
    """The served model: answers requests on the engine within `limits`. Used on the event loop's thread.

    Attributes:
        peers: all models of the server, this one included.
        places: places in the queue by client.
        turns: lock of long answers, of which one is written at a time.
        changes_adapters: whether clients may load and unload adapters.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        model_name: str,
        limits: Limits,
        render_server_metrics: Callable[[], str],
        adapters: Mapping[str, Path] = MappingProxyType({}),
        *,
        changes_adapters: bool = False,
        other_names: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.limits = limits
        self.render_server_metrics = render_server_metrics
        self.changes_adapters = changes_adapters
        self.intake = Intake(ServedText(tokenizer, model_name, limits, dict(adapters), tuple(other_names)))
        self.peers: Sequence[Service] = [self]
        self.routes: Routes = {}
        self.places: Counter[str] = Counter()
        self.turns = asyncio.Lock()

    def options_for(self, model: str, **options: Any) -> RequestOptions:
        """Returns the options of a request that names the model or an adapter."""
        return RequestOptions(**options, adapter="" if model == self.model_name else model)

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
        envelope = {"id": request_id, "created": int(time.time()), "model": body.model}
        num_choices = len(prompts) * body.num_answers
        answer = ChoicesAnswer(envelope, shape, num_choices, body.num_answers, body.include_usage)
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

        Raises:
            LowConfidenceError: `request.state.gate` does not keep the answers.
        """
        gate: ConfidenceGate | None = getattr(request.state, "gate", None)
        with_logprobs = samplings[0].logprobs is not None
        if gate is not None:
            samplings = [gate.scored(sampling) for sampling in samplings]
        options = self.options_for(body.model, priority=body.priority, cache_salt=body.cache_salt)
        jobs = [Job(f"{request_id}-{i}", *job, options) for i, job in enumerate(zip(prompts, samplings, strict=True))]
        logger.debug("request %s: prompts of %s tokens", request_id, [len(p) for p in prompts])
        request.state.user = body.user
        deltas = self.run(jobs, request)
        if gate is not None:
            deltas = gate.hold(deltas, answer.num_choices, with_logprobs)
        if body.stream:
            response: Response = EventStream(answer, deltas, self.turns)
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
        written = blocks(json_pieces(await unless_disconnected(request.receive, body)), self.turns)
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

    async def run(self, jobs: list[Job], request: Request) -> Deltas:
        """Yields deltas of all jobs as they arrive; `index` numbers answers in order of prompts.

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
            source = streams[0] if len(streams) == 1 else merge(streams, jobs[0].sampling.n)
            limits = TimeLimits(self.limits)
            try:
                while True:
                    with limits:
                        deltas = await anext(source)
                    for place, delta in enumerate(deltas):
                        if delta.finish_reason in FAILURES:
                            if place:
                                yield deltas[:place]
                            raise failure_of(delta)
                        tokens.output += len(delta.token_ids)
                    yield deltas
            except StopAsyncIteration:
                return
            finally:
                limits.timer.cancel()
                await source.aclose()


def check_all(services: Sequence[Service]) -> Health:
    """Returns the health of all models."""
    if len(services) == 1:
        return services[0].engine.check()
    return join_health({f"model {each.model_name}": each.engine.check() for each in services})

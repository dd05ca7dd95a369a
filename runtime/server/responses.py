"""Answers from deltas, one JSON body or server-sent events, and their published description.

A client that disconnects frees its request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from runtime.core.config import Limits
from runtime.core.request import Delta, FinishReason, TokenLogprobs
from runtime.server.errors import ApiError, JsonResponse, error_body
from runtime.server.response_models import (
    ChatLogprobs,
    CompletionLogprobs,
    ErrorResponse,
    TokenLogprob,
    TopLogprob,
    Usage,
)

Responses = dict[int | str, dict[str, Any]]


def _errors(**descriptions: str) -> Responses:
    """Error answers by status, given as `status_404="..."`."""
    return {
        int(name.removeprefix("status_")): {"model": ErrorResponse, "description": text}
        for name, text in descriptions.items()
    }


ANY_ERRORS = _errors(
    status_403="Asked by a page of another site, or under a foreign host name",
    status_500="The server failed",
)
"""Errors of every route."""
KEY_ERRORS = _errors(status_401="Missing or incorrect API key")
PARAMETER_ERRORS = _errors(status_404="Not found")
BODY_ERRORS = _errors(
    status_400="The body is invalid; `param` names the field",
    status_404="Another model is served",
    status_408="The body was not complete in time",
    status_413="The body is too long",
    status_429="The queue is full",
    status_503="The server is stopping, or the request got no token in time",
    status_504="The request took too long",
)
UNUSED = ("HTTPValidationError", "ValidationError")
"""Schemas of FastAPI's own answer 422, which this server never sends."""


class DescribedApi(FastAPI):
    """A FastAPI application whose description holds for the served model.

    Args:
        model_name: the one model that requests may name.
        needs_key: whether requests must carry an API key.
        open_paths: paths that need no key all the same.
    """

    def __init__(self, *, model_name: str, needs_key: bool, open_paths: tuple[str, ...], **options: Any) -> None:
        super().__init__(**options)
        self.model_name, self.needs_key, self.open_paths = model_name, needs_key, open_paths

    def openapi(self) -> dict[str, Any]:
        """Generates the description once."""
        if not self.openapi_schema:
            self.openapi_schema = self._completed(super().openapi())
        return self.openapi_schema

    def _completed(self, description: dict[str, Any]) -> dict[str, Any]:
        components = description.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for name in UNUSED:
            schemas.pop(name, None)
        for schema in schemas.values():
            name_model(schema, self.model_name)
            write_whole_bounds(schema)
        if self.needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in description["paths"].items():
            for operation in item.values():
                operation["responses"].pop("422", None)
                asks_for_key = self.needs_key and path not in self.open_paths
                if asks_for_key:
                    operation["security"] = [{"key": []}]
                operation["responses"].update(_described(ANY_ERRORS | (KEY_ERRORS if asks_for_key else {})))
        return description


def _described(errors: Responses) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ErrorResponse"}
    return {
        str(status): {"description": each["description"], "content": {"application/json": {"schema": schema}}}
        for status, each in errors.items()
    }


def name_model(schema: dict[str, Any], model_name: str) -> None:
    """Restricts the field `model` of a request to the served model."""
    field = schema.get("properties", {}).get("model", {})
    for choice in (field, *field.get("anyOf", ())):
        if choice.get("type") == "string":
            choice["enum"] = [model_name]


def write_whole_bounds(schema: Any) -> None:
    """Writes bounds of integers as integers: FastAPI turns them into floats, which cannot hold all of them."""
    children = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    for child in children:
        write_whole_bounds(child)
    if isinstance(schema, dict) and schema.get("type") == "integer":
        schema.update({name: int(value) for name, value in schema.items() if isinstance(value, float)})


logger = logging.getLogger("runtime.server")

T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, Delta], None]

CLIENT_CLOSED_REQUEST = 499
MAY_STREAM: Responses = BODY_ERRORS | {
    200: {
        "description": "The answer; if requested, a stream of server-sent events: chunks in JSON, then [DONE]",
        "content": {"text/event-stream": {}},
    }
}
DONE = b"data: [DONE]\n\n"


@dataclass
class Output:
    """Complete output of one sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class UsageCounter:
    """Token counts of a request. A prompt counts once for all of its answers."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, last: Delta) -> None:
        self.completion += last.num_output_tokens
        if last.index == 0:
            self.prompt += last.num_prompt_tokens
            self.cached += last.num_cached_tokens

    def as_json(self) -> Usage:
        """The `usage` object of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Shape(Protocol):
    """Writes the choices of one API. Used for one request."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self) -> list[dict[str, Any]]:
        """Returns choices to send before the first token."""

    def parts(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the choices for a delta, each in a chunk of its own; none for an empty delta."""

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Returns the choice of the chunk that ends a sequence."""

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """Returns the choice of an answer that is not streamed."""


@dataclass(frozen=True)
class Answer:
    """Writes the answer to one request.

    Attributes:
        envelope: `id`, `created` and `model`, the same in every chunk.
        num_choices: number of sequences.
        include_usage: end a stream with a chunk of token counts.
    """

    envelope: dict[str, Any]
    shape: Shape
    num_choices: int
    include_usage: bool = False

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        """Collects all deltas and returns one JSON object."""
        outputs = [Output() for _ in range(self.num_choices)]
        texts: list[list[str]] = [[] for _ in outputs]
        usage = UsageCounter()
        async with aclosing(deltas):
            async for index, delta in deltas:
                texts[index].append(delta.text)
                outputs[index].token_ids += delta.token_ids
                outputs[index].logprobs += delta.logprobs
                outputs[index].prompt_logprobs += delta.prompt_logprobs
                if delta.finish_reason is not None:
                    outputs[index].finish_reason = delta.finish_reason
                    usage.add(delta)
        for output, text in zip(outputs, texts, strict=True):
            output.text = "".join(text)
        choices = [self.shape.whole(index, output) for index, output in enumerate(outputs)]
        return {**self.envelope, "object": self.shape.whole_object, "choices": choices, "usage": usage.as_json()}

    async def events(self, first: tuple[int, Delta], deltas: Deltas) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events: text, one finish chunk per choice, the usage if requested, `[DONE]`.

        An error after the first token can no longer change the status; it is sent as an event and ends the stream.
        """
        usage = UsageCounter()
        for choice in self.shape.opening():
            yield self.chunk([choice])
        try:
            async with aclosing(chain(first, deltas)) as rest:
                async for index, delta in rest:
                    for choice in self.shape.parts(index, delta):
                        yield self.chunk([choice])
                    if delta.finish_reason is not None:
                        usage.add(delta)
                        yield self.chunk([self.shape.finish(index, delta.finish_reason)])
        except ApiError as error:
            yield event(error_body(error.status_code, error.detail, error.param, error.code))
        else:
            if self.include_usage:
                yield self.chunk([], usage)
        yield DONE

    def chunk(self, choices: list[dict[str, Any]], usage: UsageCounter | None = None) -> bytes:
        payload = {**self.envelope, "object": self.shape.chunk_object, "choices": choices}
        if self.include_usage:
            payload["usage"] = usage.as_json() if usage else None
        return event(payload)


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


async def respond(request: Request, deltas: Deltas, answer: Answer, stream: bool, limits: Limits) -> Response:
    """Returns the HTTP answer. If the engine refuses the request, raises before the first byte of a stream."""
    if not stream:
        return await respond_at_once(request, answer.whole(deltas))
    try:
        first = await unless_disconnected(request, anext(deltas))
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(answer.events(first, deltas), deltas, limits.client_seconds)


async def respond_at_once(request: Request, body: Awaitable[Mapping[str, Any]]) -> Response:
    """Returns an answer that is not streamed; cancels it if the client disconnects."""
    try:
        return JsonResponse(await unless_disconnected(request, body))
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


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


async def chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n\n"


LOWEST_LOGPROB = -9999.0
MAX_SKIPPED_BYTES = 8
"""Distance up to which a prompt token is searched in the text."""


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to the text, which may be part of a character."""


def json_number(logprob: float) -> float:
    """Returns a finite log-probability: JSON has no infinity, so impossible tokens get the value of OpenAI's API."""
    return max(logprob, LOWEST_LOGPROB) if isfinite(logprob) else LOWEST_LOGPROB


def token_text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def chat_logprobs(tokenizer: TokenBytes, pairs: Iterable[tuple[int, TokenLogprobs]]) -> ChatLogprobs:
    """Returns `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return {"token": token_text(raw), "logprob": json_number(logprob), "bytes": list(raw)}

    content: list[TokenLogprob] = [
        {**entry(token_id, found.logprob), "top_logprobs": [entry(*alternative) for alternative in found.top]}
        for token_id, found in pairs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobsWriter:
    """Writes `logprobs` of one completion choice incrementally; offsets count characters from the start of its text."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self.tokenizer = tokenizer
        self.offset = 0

    def write(self, pairs: Iterable[tuple[int, TokenLogprobs]]) -> CompletionLogprobs:
        """Returns the log-probabilities of new tokens of the answer."""
        written = empty_logprobs()
        for token_id, found in pairs:
            self.add(written, token_id, found)
            self.offset += count_characters(self.tokenizer.token_bytes(token_id))
        return written

    def write_prompt(self, text: str, token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Returns the log-probabilities of a prompt that precedes the answer as `text`; the first token has none.

        Args:
            found: log-probabilities of every token but the first.
        """
        written = empty_logprobs()
        raw_text, place = text.encode(), 0
        for token_id, scored in zip(token_ids, (None, *found), strict=True):
            self.add(written, token_id, scored)
            stop = end_of(self.tokenizer.token_bytes(token_id), raw_text, place)
            self.offset += count_characters(raw_text[place:stop])
            place = stop
        self.offset = len(text)
        return written

    def add(self, written: CompletionLogprobs, token_id: int, found: TokenLogprobs | None) -> None:
        written["tokens"].append(token_text(self.tokenizer.token_bytes(token_id)))
        written["token_logprobs"].append(json_number(found.logprob) if found else None)
        written["top_logprobs"].append(self.top(token_id, found) if found else None)
        written["text_offset"].append(self.offset)

    def top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """Returns alternatives by text, best first, with the sampled token; the best of tokens with equal text
        counts."""
        entries: dict[str, float] = {}
        for alternative, logprob in (*found.top, (token_id, found.logprob)):
            entries.setdefault(token_text(self.tokenizer.token_bytes(alternative)), json_number(logprob))
        return entries


def empty_logprobs() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def end_of(token: bytes, text: bytes, place: int) -> int:
    """Returns the end of a prompt token in the text, searched from `place`; `place` if it cannot be found.

    The text omits a beginning-of-sequence token and a first space, and replaces parts of characters.
    """
    for raw in (token, token.lstrip(b" ")):
        found = text.find(raw, place, place + len(raw) + MAX_SKIPPED_BYTES)
        if found >= 0:
            return found + len(raw)
    return place


def count_characters(raw: bytes) -> int:
    return sum(byte & 0xC0 != 0x80 for byte in raw)  # first bytes of characters

"""Answers written from the deltas of the engine: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from runtime.core.request import Delta, FinishReason
from runtime.server.errors import ApiError, error_body
from runtime.server.response_models import Usage, json_pieces, to_json
from runtime.text.answer_form import ReasoningCounter

T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, Delta], None]
DONE = b"data: [DONE]\n\n"


@dataclass
class UsageCounter:
    """Token counts of a request. A prompt counts once for all of its answers.

    Attributes:
        reasoning: counts tokens of reasoning; None where answers have none.
    """

    reasoning: ReasoningCounter | None = None
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
        found: Usage = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning.count}
        return found

    def note(self, index: int, delta: Delta) -> None:
        """Counts the reasoning in new tokens of a choice."""
        if self.reasoning is not None:
            self.reasoning.add(index, delta.token_ids)


class Shape(Protocol):
    """Writes the choices of one API. Used for one request."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    reasoning: ReasoningCounter | None

    def opening(self) -> list[dict[str, Any]]:
        """Returns choices to send before the first token."""

    def prelude(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Returns a choice to send before the first part of a sequence, such as its prompt. Long lists in it are
        iterators."""

    def beside(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        """Returns what a whole answer has beside its choices."""

    def parts(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the choices for a delta, each in a chunk of its own; none for an empty delta."""

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Returns the choice of the chunk that ends a sequence."""

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        """Returns the choice of an answer that is not streamed, whose deltas are joined in `output`. Long lists in it
        are iterators."""


class Answer(Protocol):
    """Writes the answer to one request."""

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        """Collects all deltas and returns one JSON object, whose long lists are iterators."""

    def events(self, first: tuple[int, Delta], deltas: Deltas) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events. An error after the first token is an event, too, and ends the stream."""


@dataclass(frozen=True)
class ChoicesAnswer:
    """Writes an answer in the form of OpenAI's API.

    Attributes:
        envelope: `id`, `created` and `model`, the same in every chunk.
        num_choices: number of sequences.
        turns: lock of all long answers; see `blocks`.
        include_usage: end a stream with a chunk of token counts.
    """

    envelope: dict[str, Any]
    shape: Shape
    num_choices: int
    turns: asyncio.Lock
    include_usage: bool = False

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        """Collects all deltas and returns one JSON object, whose long lists are iterators."""
        outputs = [Delta(self.envelope["id"]) for _ in range(self.num_choices)]
        usage = UsageCounter(self.shape.reasoning)
        async with aclosing(deltas):
            async for index, delta in deltas:
                usage.note(index, delta)
                outputs[index].append(delta)
        for output in outputs:
            usage.add(output)
        choices = (self.shape.whole(index, output) for index, output in enumerate(outputs))
        counted = {"choices": choices, "usage": usage.as_json()}
        return {**self.envelope, "object": self.shape.whole_object, **counted, **self.shape.beside(outputs)}

    async def events(self, first: tuple[int, Delta], deltas: Deltas) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events: text, one finish chunk per choice, the usage if requested, `[DONE]`.

        An error after the first token can no longer change the status; it is sent as an event and ends the stream.
        """
        usage = UsageCounter(self.shape.reasoning)
        begun: set[int] = set()
        for choice in self.shape.opening():
            yield self.chunk([choice])
        try:
            async with aclosing(chain(first, deltas)) as rest:
                async for index, delta in rest:
                    if index not in begun:
                        begun.add(index)
                        async for piece in self.prelude(index, delta):
                            yield piece
                    usage.note(index, delta)
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

    async def prelude(self, index: int, delta: Delta) -> AsyncGenerator[bytes, None]:
        """Yields the chunk before the first part of a sequence in pieces, if there is one."""
        if choice := self.shape.prelude(index, delta):
            yield EVENT_BEGINS
            async for piece in blocks(json_pieces(self.payload(iter([choice]))), self.turns):
                yield piece
            yield EVENT_ENDS

    def chunk(self, choices: list[dict[str, Any]], usage: UsageCounter | None = None) -> bytes:
        return event(self.payload(choices, usage))

    def payload(self, choices: Iterable[dict[str, Any]], usage: UsageCounter | None = None) -> dict[str, Any]:
        payload = {**self.envelope, "object": self.shape.chunk_object, "choices": choices}
        if self.include_usage:
            payload["usage"] = usage.as_json() if usage else None
        return payload


async def chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


EVENT_BEGINS, EVENT_ENDS = b"data: ", b"\n\n"


def event(payload: dict[str, Any]) -> bytes:
    return EVENT_BEGINS + to_json(payload).encode("ascii") + EVENT_ENDS


SLICE_SECONDS = 0.002
"""Time for which a long answer is written at once, after a pause as long: the event loop and the engine's thread, which
needs the interpreter lock, go on meanwhile."""
BLOCK_CHARACTERS = 2**16


async def blocks(pieces: Iterable[str], turns: asyncio.Lock) -> AsyncGenerator[bytes, None]:
    """Joins pieces of ASCII to blocks of at least `BLOCK_CHARACTERS`, the last one excepted. Pauses in between.

    Args:
        turns: lock of all long answers, of which one is written at a time; many at once would leave no pauses.
    """
    rest = iter(pieces)
    block: list[str] = []
    is_last = _write_slice(rest, block)
    while not is_last:
        if sum(map(len, block)) >= BLOCK_CHARACTERS:
            yield "".join(block).encode("ascii")
            block = []
        async with turns:
            await asyncio.sleep(SLICE_SECONDS)
            is_last = _write_slice(rest, block)
    yield "".join(block).encode("ascii")


def _write_slice(pieces: Iterator[str], block: list[str]) -> bool:
    """Appends pieces to a block for `SLICE_SECONDS`, or up to `BLOCK_CHARACTERS`. Returns whether there are no more."""
    end, num_characters = time.monotonic() + SLICE_SECONDS, 0
    for piece in pieces:
        block.append(piece)
        num_characters += len(piece)
        if num_characters >= BLOCK_CHARACTERS or time.monotonic() >= end:
            return False
    return True

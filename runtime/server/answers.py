"""Answers written from the deltas of the engine: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple, Protocol, TypeVar

from runtime.core.request import Delta, FinishReason
from runtime.server.errors import ApiError, error_body
from runtime.server.response_models import Usage, json_pieces, to_json
from runtime.text.answer_form import ReasoningCounter

T = TypeVar("T")
Deltas = AsyncGenerator[list[Delta], None]
"""Deltas of all choices of an HTTP request, as they arrive; `index` is that of the choice."""
DONE = b"data: [DONE]\n\n"
HOLE = "\0value"
"""Stands for a value in what is written once; no token is this text."""


@dataclass
class UsageCounter:
    """Token counts of a request. A prompt counts once for all of its answers.

    Attributes:
        num_answers: choices of each prompt.
        reasoning: counts tokens of reasoning; None where answers have none.
    """

    num_answers: int
    reasoning: ReasoningCounter | None = None
    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, last: Delta) -> None:
        self.completion += last.num_output_tokens
        if last.index % self.num_answers == 0:
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

    def note(self, delta: Delta) -> None:
        """Counts the reasoning in new tokens of a choice."""
        if self.reasoning is not None:
            self.reasoning.add(delta.index, delta.token_ids)


class FramedPart(NamedTuple):
    """A choice of which nothing but a few values changes in a request.

    Attributes:
        key: the same for choices that differ in their values only.
        values: their JSON, in the order in which they are written.
        choice: returns the choice with values.
    """

    key: Hashable
    values: tuple[str, ...]
    choice: Callable[..., Any]


Part = dict[str, Any] | FramedPart
text_json: Callable[[str], str] = encode_basestring_ascii


def template_of(written: str) -> str:
    """Returns JSON as a template with `%s` in place of each `HOLE`."""
    return written.replace("%", "%%").replace(to_json(HOLE), "%s")


class Frames:
    """Events that differ in a few values only: what is around these is written once.

    Args:
        write: writes a whole event.
    """

    def __init__(self, write: Callable[[Any], bytes]) -> None:
        self._write = write
        self._found: dict[Hashable, str] = {}

    def fill(self, part: FramedPart) -> bytes:
        """Returns an event."""
        return ((self._found.get(part.key) or self._add(part)) % part.values).encode("ascii")

    def _add(self, part: FramedPart) -> str:
        written = self._write(part.choice(*[HOLE] * len(part.values)))
        self._found[part.key] = template = template_of(written.decode("ascii"))
        return template


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
        """Returns what a whole answer has in addition to its choices."""

    def parts(self, index: int, delta: Delta) -> list[Part]:
        """Returns the choices for a delta, each in a chunk of its own; none for an empty delta."""

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Returns the choice of the chunk that ends a sequence."""

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        """Returns the choice of an answer that is not streamed, whose deltas are joined in `output`. Long lists in it
        are iterators."""


class Answer(Protocol):
    """Writes the answer to one request: whole, or as server-sent events, of which a method returns none or several.

    Attributes:
        num_choices: number of sequences.
    """

    num_choices: int = 1

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        """Collects all deltas and returns one JSON object, whose long lists are iterators."""

    def begin(self, first: Delta) -> bytes:
        """Returns the events before all others."""

    def prelude(self, delta: Delta) -> Iterator[str]:
        """Yields an event before the first part of a choice in pieces, because it may be long."""
        return iter(())

    def write(self, delta: Delta) -> bytes:
        """Returns the events of a delta."""

    def end(self, error: ApiError | None) -> bytes:
        """Returns the events after all others. An error can no longer change the status, so it is an event, too."""


@dataclass
class ChoicesAnswer(Answer):
    """Writes an answer in the form of OpenAI's API: text, one finish chunk per choice, the usage if requested,
    `[DONE]`.

    Attributes:
        envelope: `id`, `created` and `model`, the same in every chunk.
        num_answers: choices of each prompt.
        include_usage: end a stream with a chunk of token counts.
    """

    envelope: dict[str, Any]
    shape: Shape
    num_choices: int = 1
    num_answers: int = 1
    include_usage: bool = False

    def __post_init__(self) -> None:
        self.usage = UsageCounter(self.num_answers, self.shape.reasoning)
        self.frames = Frames(self.chunk)

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        outputs = [Delta(self.envelope["id"]) for _ in range(self.num_choices)]
        async for delta in each(deltas):
            self.usage.note(delta)
            outputs[delta.index].append(delta)
        for output in outputs:
            self.usage.add(output)
        choices = (self.shape.whole(index, output) for index, output in enumerate(outputs))
        counted = {"choices": choices, "usage": self.usage.as_json()}
        return {**self.envelope, "object": self.shape.whole_object, **counted, **self.shape.beside(outputs)}

    def begin(self, first: Delta) -> bytes:
        return b"".join(map(self.chunk, self.shape.opening()))

    def prelude(self, delta: Delta) -> Iterator[str]:
        if choice := self.shape.prelude(delta.index, delta):
            yield EVENT_BEGINS
            yield from json_pieces(self.payload(iter([choice])))
            yield EVENT_ENDS

    def write(self, delta: Delta) -> bytes:
        self.usage.note(delta)
        parts = self.shape.parts(delta.index, delta)
        if delta.finish_reason is not None:
            self.usage.add(delta)
            parts = [*parts, self.shape.finish(delta.index, delta.finish_reason)]
        return b"".join([self.frames.fill(p) if isinstance(p, FramedPart) else self.chunk(p) for p in parts])

    def end(self, error: ApiError | None) -> bytes:
        if error is not None:
            return event(error_body(error.status_code, error.detail, error.param, error.code)) + DONE
        return event(self.payload([], self.usage)) + DONE if self.include_usage else DONE

    def chunk(self, choice: dict[str, Any]) -> bytes:
        before, after = self.frame
        return b"%b[%b]%b" % (before, to_json(choice).encode("ascii"), after)

    @cached_property
    def frame(self) -> tuple[bytes, bytes]:
        """Beginning and end that all chunks have around their choice, written once."""
        before, _, after = event(self.payload([])).rpartition(b"[]")
        return before, after

    def payload(self, choices: Iterable[dict[str, Any]], usage: UsageCounter | None = None) -> dict[str, Any]:
        payload = {**self.envelope, "object": self.shape.chunk_object, "choices": choices}
        if self.include_usage:
            payload["usage"] = usage.as_json() if usage else None
        return payload


async def each(deltas: Deltas) -> AsyncGenerator[Delta, None]:
    async with aclosing(deltas):
        async for group in deltas:
            for delta in group:
                yield delta


async def chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


EVENT_BEGINS, EVENT_ENDS = "data: ", "\n\n"


def event(payload: dict[str, Any]) -> bytes:
    return f"{EVENT_BEGINS}{to_json(payload)}{EVENT_ENDS}".encode("ascii")


def named_event(name: str, /, **fields: Any) -> bytes:
    """Returns an event whose name is also its type."""
    return f"event: {name}\n".encode("ascii") + event({"type": name, **fields})


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

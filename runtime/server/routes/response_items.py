"""Items of a response, written as the text of the answer comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

from runtime.core.request import FinishReason, TokenLogprobs
from runtime.server.answers import FramedPart, Frames, named_event, text_json
from runtime.server.response_models import to_json
from runtime.server.routes.chat import TokenFrames
from runtime.text.answer_form import AnswerForm, AnswerParser
from runtime.text.pieces import CallArguments, CallStart, Piece, Reasoning

Logprobs = Sequence[tuple[int, TokenLogprobs]]
"""Tokens with their log-probabilities."""


@dataclass
class ItemWriter:
    """Makes items of the pieces of an answer, and the events that tell of them.

    Attributes:
        items: as far as they have begun; texts of the last one are set when it ends.
        kind: what the text of the open item is called in events; empty if no item is open.
        texts: text of the last item.
        logprobs: log-probabilities of its tokens in JSON, which every event of its end repeats.
        hole: stands for them in these events; no text holds it.
    """

    form: AnswerForm
    tokens: TokenFrames
    items: list[dict[str, Any]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    parser: AnswerParser = field(init=False)
    kind: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    hole: str = field(default_factory=lambda: uuid4().hex)

    def __post_init__(self) -> None:
        self.parser = self.form.parser()
        self.frames = Frames(lambda event: self.event(*event))

    def push(self, text: str, reason: FinishReason | None, logprobs: Logprobs = ()) -> Iterator[bytes]:
        """Yields the events of new text; with the last, those of the end. Answers without text have an empty message.

        Args:
            logprobs: those of new tokens, of answers that are nothing but text.
        """
        pieces = self.form.shown(self.parser.push(text))
        for piece in pieces or ([""] if logprobs else []):
            yield from self.add(piece, logprobs)
        if reason is not None:
            for piece in self.form.shown(self.parser.flush()):
                yield from self.add(piece, ())
            if not self.items:
                yield from self.begin_text("output_text")
            yield from self.end("incomplete" if reason is FinishReason.LENGTH else "completed")

    def add(self, piece: Piece, logprobs: Logprobs) -> Iterator[bytes]:
        if isinstance(piece, CallStart):
            number = sum(item["type"] == "function_call" for item in self.items)
            call = {"call_id": self.form.new_id(piece.name, number), "name": piece.name, "arguments": ""}
            item = {"id": f"fc_{uuid4().hex}", "type": "function_call", **call}
            yield from self.begin("function_call_arguments", item)
            return
        if not isinstance(piece, CallArguments):
            kind = "reasoning_text" if isinstance(piece, Reasoning) else "output_text"
            if self.kind != kind:
                yield from self.begin_text(kind)
        yield self.delta(piece if isinstance(piece, str) else piece.text, logprobs)

    def delta(self, text: str, logprobs: Logprobs) -> bytes:
        """Adds text to the open item and returns its event, of which the rest is written once."""
        self.texts.append(text)
        values: tuple[str, ...] = (str(next(self.numbers)), text_json(text))
        if self.kind == "output_text":
            values += (f"[{(content := self.tokens.content(logprobs))}]",)
            self.logprobs += [content] if content else []
        return self.frames.fill(FramedPart(len(self.items), values, self.delta_event))

    def delta_event(self, number: Any, text: Any, logprobs: Any = None) -> tuple[str, Any, dict[str, Any]]:
        fields = {**self.place(), "delta": text}
        return f"{self.kind}.delta", number, fields if logprobs is None else {**fields, "logprobs": logprobs}

    def begin_text(self, kind: str) -> Iterator[bytes]:
        """Begins an item with one part."""
        part: dict[str, Any] = {"type": kind, "text": ""}
        item: dict[str, Any]
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
            item = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "content": []}
        else:
            item = {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": []}
        yield from self.begin(kind, item)
        yield self.next_event("content_part.added", **self.place(), part=part)
        item["content"] = [part]

    def begin(self, kind: str, item: dict[str, Any]) -> Iterator[bytes]:
        """Ends the item before and adds one."""
        yield from self.end("completed")
        item["status"] = "in_progress"
        self.items.append(item)
        self.kind, self.texts, self.logprobs = kind, [], []
        yield self.next_event("output_item.added", output_index=len(self.items) - 1, item=item)

    def end(self, status: str) -> Iterator[bytes]:
        """Ends the open item, if there is one."""
        if not self.kind:
            return
        item, place, text = self.items[-1], self.place(), "".join(self.texts)
        item["status"] = status
        if self.kind == "function_call_arguments":
            item["arguments"] = text
            yield self.next_event(f"{self.kind}.done", **place, name=item["name"], arguments=text)
        else:
            (part,) = item["content"]
            part["text"] = text
            fields: dict[str, Any] = {"text": text}
            if self.kind == "output_text":
                part["logprobs"] = [self.hole] if self.logprobs else []
                fields["logprobs"] = part["logprobs"]
            yield self.next_event(f"{self.kind}.done", **place, **fields)
            yield self.next_event("content_part.done", **place, part=part)
        yield self.next_event("output_item.done", output_index=place["output_index"], item=item)
        self.kind = ""

    def place(self) -> dict[str, Any]:
        """Returns the fields that say what an event is about."""
        found = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return found if self.kind == "function_call_arguments" else {**found, "content_index": 0}

    def next_event(self, name: str, /, **fields: Any) -> bytes:
        return self.event(name, next(self.numbers), fields)

    def event(self, name: str, number: Any, fields: dict[str, Any]) -> bytes:
        written = named_event(f"response.{name}", sequence_number=number, **fields)
        if not self.logprobs:
            return written
        return written.replace(to_json(self.hole).encode("ascii"), ",".join(self.logprobs).encode("ascii"))

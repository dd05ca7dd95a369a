"""Items of a response, written as the text of the answer comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from runtime.server.response_models import to_json
from runtime.text.answer_form import AnswerForm, AnswerParser
from runtime.text.pieces import CallArguments, CallStart, Piece, Reasoning

Event = tuple[str, dict[str, Any]]
"""Name and fields of a server-sent event."""


@dataclass
class ItemWriter:
    """Makes items of the pieces of an answer, and the events that tell of them.

    Attributes:
        items: as far as they are written; the last one may be open.
    """

    form: AnswerForm
    items: list[dict[str, Any]] = field(default_factory=list)
    parser: AnswerParser = field(init=False)
    is_open: bool = False

    def __post_init__(self) -> None:
        self.parser = self.form.parser()

    def push(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        """Adds text; `logprobs` are those of its tokens, of answers that are nothing but text."""
        pieces = self.form.shown(self.parser.push(text))
        for piece in pieces or ([""] if logprobs else []):
            yield from self.add(piece, logprobs)

    def flush(self, *, is_complete: bool) -> Iterator[Event]:
        """Adds what was held back, and ends the last item; an answer without any has an empty message."""
        for piece in self.form.shown(self.parser.flush()):
            yield from self.add(piece, [])
        if not self.items:
            yield from self.begin_message()
        yield from self.end("completed" if is_complete else "incomplete")

    def add(self, piece: Piece, logprobs: list[Any]) -> Iterator[Event]:
        if isinstance(piece, CallStart):
            yield from self.begin_call(piece)
        elif isinstance(piece, CallArguments):
            self.items[-1]["arguments"] += piece.text
            yield "response.function_call_arguments.delta", {**self.place(), "delta": piece.text}
        elif isinstance(piece, Reasoning):
            if not self.is_within("reasoning"):
                yield from self.begin({"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": []})
                yield self.begin_part({"type": "reasoning_text", "text": ""})
            self.items[-1]["content"][0]["text"] += piece.text
            yield "response.reasoning_text.delta", {**self.place(), "content_index": 0, "delta": piece.text}
        else:
            if not self.is_within("message"):
                yield from self.begin_message()
            part = self.items[-1]["content"][0]
            part["text"] += piece
            part["logprobs"] += logprobs
            fields = {**self.place(), "content_index": 0, "delta": piece, "logprobs": logprobs}
            yield "response.output_text.delta", fields

    def is_within(self, kind: str) -> bool:
        """Returns whether the open item is of a type."""
        return self.is_open and self.items[-1]["type"] == kind

    def begin_message(self) -> Iterator[Event]:
        item: dict[str, Any] = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "content": []}
        yield from self.begin(item)
        yield self.begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def begin_part(self, part: dict[str, Any]) -> Event:
        """Adds the content of the open item."""
        self.items[-1]["content"] = [part]
        added = copied(self.items[-1])["content"][0]
        return "response.content_part.added", {**self.place(), "content_index": 0, "part": added}

    def begin_call(self, start: CallStart) -> Iterator[Event]:
        number = sum(item["type"] == "function_call" for item in self.items)
        call = {"call_id": self.form.new_id(start.name, number), "name": start.name, "arguments": ""}
        yield from self.begin({"id": f"fc_{uuid4().hex}", "type": "function_call", **call})

    def begin(self, item: dict[str, Any]) -> Iterator[Event]:
        """Ends the item before and adds one."""
        yield from self.end("completed")
        item["status"] = "in_progress"
        self.items.append(item)
        self.is_open = True
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": copied(item)}

    def end(self, status: str) -> Iterator[Event]:
        """Ends the open item, if there is one."""
        if not self.is_open:
            return
        item, place = self.items[-1], self.place()
        item["status"], self.is_open = status, False
        if item["type"] == "message":
            part = item["content"][0]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**place, "content_index": 0, **text}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        elif item["type"] == "reasoning":
            (part,) = item["content"]
            yield "response.reasoning_text.done", {**place, "content_index": 0, "text": part["text"]}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        else:
            called = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **called}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def copied(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item as it is now."""
    return {**item, **({"content": [dict(part) for part in item["content"]]} if "content" in item else {})}


def event(name: str, number: int, /, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {to_json({'type': name, 'sequence_number': number, **fields})}\n\n".encode("ascii")

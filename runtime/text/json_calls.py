"""Tool calls with a JSON object as arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.text.call_head import QUOTED, WAIT, Head, JsonEnd, Part, match_head
from runtime.text.pieces import CallArguments, CallPiece, CallStart
from runtime.text.tool_format import CallReader, ReaderState, Tool, ToolFormat
from runtime.text.tool_grammar import json_rule, literal, object_schema, relocated

NAME = "NAME"
"""Placeholder of the name in `JsonToolFormat.before`."""


@dataclass(frozen=True, kw_only=True)
class JsonToolFormat(ToolFormat):
    """Format of calls: `before`, a JSON object with the arguments, `after`.

    Attributes:
        heads: parts before the arguments, in all accepted variants; the name is the first variable part.
        before: enforced head, with the name in place of `NAME`.
        after: enforced tail.
        tail: accepted parts of the tail, all optional.
        first: text before the first call of a section.
        key: key of the arguments if the whole call is an object; None otherwise.
    """

    heads: tuple[tuple[Part, ...], ...]
    before: str
    after: str = ""
    tail: tuple[str, ...] = ()
    first: str = ""
    key: str | None = None

    def reader(self, tools: Sequence[Tool], *, is_first: bool) -> CallReader:
        return JsonCallReader(self, self.first if is_first else "")

    def call_rules(self, rule: str, tool: Tool, special_ids: Mapping[str, int]) -> list[str]:
        before, after = literal(self.before.replace(NAME, tool["name"]), special_ids), literal(self.after, special_ids)
        return [f"{rule}: {before} {rule}_arguments {after}", f"{rule}_arguments: {json_rule(tool.get('parameters'))}"]

    def schema_of_call(self, tool: Tool) -> dict[str, Any]:
        if self.key is None:
            raise ValueError("calls of this format are not JSON objects")
        arguments = relocated(object_schema(tool.get("parameters")), f"#/properties/{self.key}")
        properties = {"name": {"const": tool["name"]}, self.key: arguments}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def object_format(key: str = "arguments", **options: Any) -> JsonToolFormat:
    """Returns a format of calls like `{"name": ..., "arguments": ...}`.

    Args:
        options: fields of the format; `before` and `after` enclose the object.
    """
    before, after = options.pop("before", ""), options.pop("after", "")
    return JsonToolFormat(
        heads=(("{", '"name"', ":", QUOTED, ",", f'"{key}"', ":"),),
        before=f'{before}{{"name": "{NAME}", "{key}": ',
        after=f"}}{after}",
        key=key,
        **options,
    )


class JsonCallReader:
    """Reader that passes arguments through incrementally.

    A call is certain after its name and the first bracket of its arguments, whatever follows. An object with keys in
    another order is read completely, and is a call if it is valid JSON.
    """

    def __init__(self, tool_format: JsonToolFormat, first: str) -> None:
        self.state = ReaderState.HEAD
        self._format = tool_format
        self._first: tuple[Part, ...] = (first,) if first else ()
        self._tail = list(tool_format.tail)
        self._end = JsonEnd()
        self._whole: JsonEnd | None = None
        self._num_seen = 0
        self._in_tail = self._skips = False

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        if self._whole is not None:
            return self._read_whole(text)
        consumed = 0
        pieces: list[CallPiece] = []
        if self.state is ReaderState.HEAD:
            head = self._match(text)
            if not isinstance(head, Head):
                return self._read_whole(text) if head is None else (0, [])
            name = head.values[0]
            self.state, consumed = ReaderState.BODY, head.end - 1
            pieces = [CallStart(json.loads(name) if name.startswith('"') else name)]
        if not self._in_tail:
            end = self._end.feed(text[consumed:])
            stop = len(text) if end is None else consumed + end
            pieces += [CallArguments(text[consumed:stop])] if stop > consumed else []
            consumed, self._in_tail = stop, end is not None
        if self._in_tail:
            consumed += self._read_tail(text[consumed:])
        return consumed, pieces

    def flush(self, text: str) -> list[CallPiece]:
        return []

    def _match(self, text: str) -> Any:
        """Returns the head, WAIT, or None."""
        found = [match_head(text, (*self._first, *parts, "{")) for parts in self._format.heads]
        heads = [head for head in found if isinstance(head, Head) and is_name(head.values[0])]
        return heads[0] if heads else WAIT if WAIT in found else None

    def _read_whole(self, text: str) -> tuple[int, list[CallPiece]]:
        """Reads an object with keys in another order."""
        start = match_head(text, (*self._first, "{"))
        if self._format.key is None or not isinstance(start, Head):
            self.state = ReaderState.NO_CALL
            return 0, []
        if self._whole is None:
            self._whole, self._num_seen = JsonEnd(), start.end - 1
        end = self._whole.feed(text[self._num_seen :])
        if end is None:
            self._num_seen = len(text)
            return 0, []
        stop = self._num_seen + end
        pieces = parse_call(text[start.end - 1 : stop], self._format.key)
        self.state = ReaderState.DONE if pieces else ReaderState.NO_CALL
        return (stop if pieces else 0), pieces

    def _read_tail(self, text: str) -> int:
        """Consumes the expected tail after the arguments."""
        consumed = 0
        if self._format.key is not None:
            consumed = self._read_object_end(text)
            if self.state is not ReaderState.DONE:
                return consumed
            self.state = ReaderState.BODY
        while self._tail:
            found = match_head(text[consumed:], self._tail[:1])
            if found is WAIT:
                return consumed
            consumed += found.end if isinstance(found, Head) else 0
            self._tail = self._tail[1:]
        self.state = ReaderState.DONE
        return consumed

    def _read_object_end(self, text: str) -> int:
        """Consumes the rest of the object around the arguments."""
        if self._skips:
            end = self._end.feed(text)
            if end is not None:
                self.state = ReaderState.DONE
            return len(text) if end is None else end
        bare = text.lstrip()
        if not bare:
            return 0
        blanks = len(text) - len(bare)
        if bare[0] == ",":
            self._skips, self._end = True, JsonEnd(depth=1)
            return blanks + self._read_object_end(bare)
        self.state = ReaderState.DONE
        return blanks + 1 if bare[0] == "}" else 0


def is_name(text: str) -> bool:
    """Returns whether a name is plain or a JSON string that is not empty."""
    try:
        return not text.startswith('"') or bool(json.loads(text))
    except ValueError:
        return False


def parse_call(text: str, key: str) -> list[CallPiece]:
    """Returns the call that a JSON object represents, if it does."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    name, arguments = value.get("name"), value.get(key)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return []
    return [CallStart(name), CallArguments(json.dumps(arguments, ensure_ascii=False))]

"""Tool calls with each argument between tags, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.text.call_head import Head, Part, held_back, match_head
from runtime.text.json_rules import value_rule
from runtime.text.parameter_schemas import Schema, argument_json, check_enforceable, is_text, properties_of
from runtime.text.pieces import CallArguments, CallPiece, CallStart
from runtime.text.tool_format import CallReader, ReaderState, Tool, ToolFormat
from runtime.text.tool_grammar import ANY, escape, literal


@dataclass(frozen=True, kw_only=True)
class TaggedToolFormat(ToolFormat):
    """Format of calls: a head with the name, arguments between tags, and an end.

    Attributes:
        head: parts before the arguments, with the name as variable part.
        before: enforced head, with the name in place of `NAME`.
        key: tags around the name of an argument.
        value: tags around its value; the first may be empty.
        end: end of a call; may be empty if the section ends with the call.
        newlines: whether values are enclosed in line breaks, which are not part of them.
    """

    head: tuple[Part, ...]
    before: str
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    newlines: bool = False

    def reader(self, tools: Sequence[Tool], *, is_first: bool) -> CallReader:
        return TaggedCallReader(self, tools)

    def call_rules(self, rule: str, tool: Tool, special_ids: Mapping[str, int]) -> list[str]:
        check_enforceable(tool)
        required = (tool.get("parameters") or {}).get("required", ())
        names: list[str] = []
        rules: list[str] = []
        for number, (name, schema) in enumerate(properties_of(tool).items()):
            argument = f"{rule}_argument_{number}"
            names.append(argument + ("" if name in required else "?"))
            rules += self._argument_rules(argument, name, schema, special_ids)
        head = literal(self.before.replace("NAME", tool["name"]), special_ids)
        end = literal(f"{self.end}\n" if self.end else "", special_ids)
        return [f"{rule}: {head} {' '.join(names)} {end}", *rules]

    def _argument_rules(self, rule: str, name: str, schema: Schema, special_ids: Mapping[str, int]) -> Iterator[str]:
        gap = "" if self.newlines else "\n"
        line = "\n" if self.newlines else ""
        before = literal(f"{self.key[0]}{name}{self.key[1]}{gap}{self.value[0]}{line}", special_ids)
        close = f"{line}{self.value[1]}"
        after = literal(f"{close}\n", special_ids)
        if not is_text(schema):
            yield f"{rule}: {before} {rule}_value {after}"
            yield f"{rule}_value: {value_rule(schema)}"
            return
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            yield f"{rule}: {before} ({' | '.join(json.dumps(each, ensure_ascii=False) for each in values)}) {after}"
        elif self.value[1] in special_ids:  # which text cannot contain
            yield f"{rule}: {before} {rule.upper()}_TEXT {after}"
            yield f"{rule.upper()}_TEXT: /{characters(schema)}/"
        else:
            yield f'{rule}: {before} {rule}_text "\\n"'
            yield f"{rule}_text[lazy]: /{characters(schema)}{escape(close)}/"


def characters(schema: Schema) -> str:
    """Returns a regular expression for texts of the lengths that a schema allows."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return rf"(.|\n){{{least},{most}}}" if least or most != "" else ANY


class TaggedCallReader:
    """Reader that emits arguments as JSON: text incrementally, other values when complete.

    A call is certain once its name is followed by an argument or its end. It ends before any other text. Values are
    converted by the types of the tool's schema.
    """

    def __init__(self, tool_format: TaggedToolFormat, tools: Sequence[Tool]) -> None:
        self.state = ReaderState.HEAD
        self._format, self._tools = tool_format, tools
        self._schemas: dict[str, Schema] = {}
        self._schema: Schema | None = None
        self._num_arguments = 0
        self._in_value = self._is_text = False
        self._num_searched = 0

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        consumed = 0
        pieces: list[CallPiece] = []
        if self.state is ReaderState.HEAD:
            head = self._match(text)
            if head is None:
                return 0, []
            self.state, consumed = ReaderState.BODY, head.end
            pieces = [CallStart(head.values[0])]
            self._schemas = next((properties_of(tool) for tool in self._tools if tool["name"] == head.values[0]), {})
        parts = []
        while self.state is ReaderState.BODY:
            step = self._read_value if self._in_value else self._read_tags
            count, part = step(text[consumed:])
            consumed += count
            parts.append(part)
            if not count and self.state is ReaderState.BODY:
                break
        written = "".join(parts)
        return consumed, [*pieces, *([CallArguments(written)] if written else [])]

    def flush(self, text: str) -> list[CallPiece]:
        if not self._in_value:
            return []
        written = text_json(text) if self._is_text else text.strip()
        return [CallArguments(written)] if written else []

    def _match(self, text: str) -> Head | None:
        """Returns the head once its first argument or its end follows."""
        ends = (self._format.end or self._format.closing, self._format.key[0])
        found = [match_head(text, (*self._format.head, end)) for end in ends]
        if found == [None, None]:
            self.state = ReaderState.NO_CALL
        return match_only(text, self._format.head) if any(isinstance(each, Head) for each in found) else None

    def _read_tags(self, text: str) -> tuple[int, str]:
        """Reads between two values: the tags of the next argument, or the end of the call."""
        key, value = self._format.key, self._format.value
        if isinstance(end := match_head(text, (self._format.end or self._format.closing,)), Head):
            self.state = ReaderState.DONE
            return (end.end if self._format.end else 0), self._close()
        opened = match_head(text, key[:1])
        if opened is None and end is None:
            self.state = ReaderState.DONE
            return 0, self._close()
        if not isinstance(opened, Head) or (closed := text.find(key[1], opened.end)) < 0:
            return 0, ""
        position = closed + len(key[1])
        if value[0]:
            begun = match_head(text[position:], value[:1])
            if begun is None:
                self.state = ReaderState.DONE
                return 0, self._close()
            if not isinstance(begun, Head):
                return 0, ""
            position += begun.end
        if self._format.newlines:
            if position == len(text):
                return 0, ""
            position += text[position] == "\n"
        return position, self._open(text[opened.end : closed])

    def _open(self, name: str) -> str:
        self._schema = self._schemas.get(name)
        self._in_value, self._is_text, self._num_searched = True, is_text(self._schema), 0
        self._num_arguments += 1
        before = "{" if self._num_arguments == 1 else ", "
        return before + json.dumps(name, ensure_ascii=False) + (': "' if self._is_text else ": ")

    def _close(self) -> str:
        return "}" if self._num_arguments else "{}"

    def _read_value(self, text: str) -> tuple[int, str]:
        close = self._format.value[1]
        end = text.find(close, max(0, self._num_searched - len(close)))
        if end < 0:
            self._num_searched = len(text)
            return self._read_part(text) if self._is_text else (0, "")
        self._in_value = False
        value = text[:end]
        if self._format.newlines:
            value = value.removesuffix("\n")
        written = text_json(value) + '"' if self._is_text else argument_json(value, self._schema)
        return end + len(close), written

    def _read_part(self, text: str) -> tuple[int, str]:
        """Reads the part of a text value that cannot belong to the end tag."""
        close = self._format.value[1]
        marks = (f"\n{close}", close) if self._format.newlines else (close,)
        stop = len(text) - max(held_back(text, mark) for mark in marks)
        self._num_searched = 0
        return stop, text_json(text[:stop])


def match_only(text: str, parts: Sequence[Part]) -> Head | None:
    """Returns the head of a text, treating the text as complete."""
    found = match_head(text, parts)
    return found if isinstance(found, Head) else None


def text_json(text: str) -> str:
    """Returns a part of a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

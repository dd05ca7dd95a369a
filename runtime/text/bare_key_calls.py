"""Tool calls with an object of bare keys and strings between marks as arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.text.bare_key_grammar import BareKeyGrammar
from runtime.text.call_head import Head, Part, held_back, match_head
from runtime.text.parameter_schemas import Schema, argument_json, properties_of
from runtime.text.pieces import CallArguments, CallPiece, CallStart
from runtime.text.tagged_calls import text_json
from runtime.text.tool_format import CallReader, ReaderState, Tool, ToolFormat

KEY_END, VALUE_END = re.compile(":"), re.compile(r"[,}\]]")


@dataclass(frozen=True, kw_only=True)
class BareKeyToolFormat(ToolFormat):
    """Format of calls: a head with the name, and an object such as `{city:<|"|>Rome<|"|>,days:2}`.

    Attributes:
        head: parts before the object, with the name as variable part.
        before: enforced head, with the name in place of `NAME`.
        quote: mark around strings, which are not escaped.
    """

    head: tuple[Part, ...]
    before: str
    quote: str

    def reader(self, tools: Sequence[Tool], *, is_first: bool) -> CallReader:
        return BareKeyCallReader(self, tools)

    def call_rules(self, rule: str, tool: Tool, special_ids: Mapping[str, int]) -> list[str]:
        return BareKeyGrammar(tool, self.quote, special_ids).call_rules(rule, self.before.replace("NAME", tool["name"]))


class BareKeyCallReader:
    """Reader that emits arguments as JSON: strings incrementally, other values when complete.

    A call is certain from the bracket after its name. Values without marks are JSON, or text if the tool's schema
    allows strings only.
    """

    def __init__(self, tool_format: BareKeyToolFormat, tools: Sequence[Tool]) -> None:
        self.state = ReaderState.HEAD
        self._format, self._tools = tool_format, tools
        self._schemas: dict[str, Schema] = {}
        self._schema: Schema | None = None
        self._open: list[str] = []
        self._in_text = self._is_key = False

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        position = 0
        pieces: list[CallPiece] = []
        if self.state is ReaderState.HEAD:
            head = match_head(text, (*self._format.head, "{"))
            if not isinstance(head, Head):
                self.state = ReaderState.NO_CALL if head is None else self.state
                return 0, []
            self.state, position, name = ReaderState.BODY, head.end - 1, head.values[0]
            self._schemas = next((properties_of(tool) for tool in self._tools if tool["name"] == name), {})
            pieces = [CallStart(name)]
        parts = []
        while self.state is ReaderState.BODY and position < len(text):
            stop, part = (self._read_text if self._in_text else self._read_mark)(text, position)
            if stop == position:
                break
            position = stop
            parts.append(part)
        written = "".join(parts)
        return position, [*pieces, *([CallArguments(written)] if written else [])]

    def flush(self, text: str) -> list[CallPiece]:
        rest = text_json(text) if self._in_text else text.strip()
        is_lost = not self._in_text and (self._is_key or self._format.quote.startswith(rest))
        return [] if is_lost or not rest else [CallArguments(rest)]

    def _read_text(self, text: str, position: int) -> tuple[int, str]:
        """Reads a string up to its end, or the part that cannot belong to the end mark."""
        quote = self._format.quote
        end = text.find(quote, position)
        if end < 0:
            stop = len(text) - held_back(text[position:], quote)
            return stop, text_json(text[position:stop])
        self._in_text = False
        return end + len(quote), text_json(text[position:end]) + '"'

    def _read_mark(self, text: str, position: int) -> tuple[int, str]:
        """Reads one bracket, separator, mark or value between strings; nothing if more text is needed to decide."""
        quote, character = self._format.quote, text[position]
        if text.startswith(quote, position):
            self._in_text = True
            return position + len(quote), '"'
        if quote.startswith(text[position:]):
            return position, ""
        if character in "{[":
            self._open.append(character)
        elif character in "}]":
            self._open.pop()
            self.state = self.state if self._open else ReaderState.DONE
        elif character not in ",:" and not character.isspace():
            return self._read_bare(text, position)
        if character in "{[,:":
            self._is_key = character != ":" and self._open[-1] == "{"
        spaced = f"{character} " if character in ",:" else character
        return position + 1, "" if character.isspace() else spaced

    def _read_bare(self, text: str, position: int) -> tuple[int, str]:
        """Reads a key or a value without marks."""
        end = (KEY_END if self._is_key else VALUE_END).search(text, position)
        if end is None:
            return position, ""
        word, is_outer = text[position : end.start()].strip(), len(self._open) == 1
        if not self._is_key:
            return end.start(), argument_json(word, self._schema if is_outer else None)
        self._schema = self._schemas.get(word) if is_outer else self._schema
        return end.start(), f'"{text_json(word)}"'

"""Parts of an answer's text, and the parser that separates them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from runtime.text.harmony import HARMONY, HarmonyFormat, HarmonyParser
from runtime.text.pieces import Piece, Reasoning, joined
from runtime.text.reasoning import MARKS, Position, ReasoningFormat, ReasoningSplitter
from runtime.text.tool_format import Tool, ToolFormat
from runtime.text.tool_parser import ToolCallParser

FORMATS: tuple[ReasoningFormat, ...] = (HARMONY, *MARKS)


def find_reasoning(template: str) -> ReasoningFormat | None:
    """Returns the reasoning format of a chat template; None if it has none."""
    return next((each for each in FORMATS if re.search(each.mark, template)), None)


class AnswerParser(Protocol):
    """Incremental parser of an answer's text. The result does not depend on how the text is split."""

    @property
    def num_calls(self) -> int:
        """Number of calls started so far."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the parser is inside reasoning."""

    def push(self, text: str) -> list[Piece]: ...

    def flush(self) -> list[Piece]: ...


class PartsParser:
    """Parser of reasoning followed by text and calls.

    Args:
        reasoning: splitter of reasoning; None if all text is the answer.
        calls: parser of tool calls; None without tools.
    """

    def __init__(self, reasoning: ReasoningSplitter | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls else 0

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [text] if text else []
        return joined(self._split(self._reasoning.push(text) if self._reasoning else pieces))

    def flush(self) -> list[Piece]:
        pieces = self._split(self._reasoning.flush()) if self._reasoning else []
        return joined([*pieces, *(self._calls.flush() if self._calls else ())])

    def _split(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.push(piece) if self._calls and isinstance(piece, str) else [piece]
        return found


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Possible parts of an answer's text.

    Attributes:
        tool_format: format of tool calls; None without tools.
        tools: tools that the answer may call.
        several: whether to report more than one call.
        reasoning: marks of reasoning; None leaves it in the text.
        position: position of the answer's start relative to its reasoning.
        shows_reasoning: whether the answer includes its reasoning.
    """

    tool_format: ToolFormat | None = None
    tools: Sequence[Tool] = ()
    several: bool = True
    reasoning: ReasoningFormat | None = None
    position: Position = Position.AFTER
    shows_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether the text consists of content only."""
        return self.tool_format is None and self.reasoning is None

    def parser(self) -> AnswerParser:
        """Returns a parser for one answer."""
        tools = self.tool_format
        if isinstance(self.reasoning, HarmonyFormat):
            return HarmonyParser(calls=tools is not None, several=self.several)
        reasoning = ReasoningSplitter(self.reasoning, self.position) if self.reasoning else None
        return PartsParser(reasoning, ToolCallParser(tools, self.tools, several=self.several) if tools else None)

    def shown(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Returns the pieces to include in the answer."""
        return [piece for piece in pieces if self.shows_reasoning or not isinstance(piece, Reasoning)]

    def new_id(self, name: str, number: int) -> str:
        """Returns an id for a call, given its number in the answer."""
        return self.tool_format.new_id(name, number) if self.tool_format else ""


@dataclass
class ReasoningCounter:
    """Counter of reasoning tokens, up to and including the end mark.

    Attributes:
        token_bytes: function from a token id to its bytes.
        parsers: parsers by index of the answer; they read bytes as Latin-1, because tokens may end within characters.
    """

    form: AnswerForm
    token_bytes: Callable[[int], bytes]
    parsers: dict[int, AnswerParser] = field(default_factory=dict)
    count: int = 0

    def add(self, index: int, token_ids: Iterable[int]) -> None:
        """Adds tokens of one answer."""
        parser = self.parsers.get(index) or self.parsers.setdefault(
            index, replace(self.form, tool_format=None).parser()
        )
        for token_id in token_ids:
            self.count += parser.is_reasoning
            parser.push(self.token_bytes(token_id).decode("latin-1"))

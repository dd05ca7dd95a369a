"""Reasoning before an answer: its marks, found by chat templates, and the splitter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from runtime.text.call_head import held_back
from runtime.text.pieces import Piece, Reasoning
from runtime.text.tool_grammar import ANY, escape, literal


class Position(Enum):
    """Position of an answer's start relative to its reasoning."""

    BEFORE = auto()
    """The answer may begin with reasoning."""
    INSIDE = auto()
    AFTER = auto()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks around reasoning.

    Attributes:
        mark: regular expression that occurs in the chat templates of this format.
    """

    name: str
    mark: str
    opening: str
    closing: str

    def position(self, prompt: str) -> Position:
        """Returns the start position of the answer to a prompt: templates may open reasoning, or open and close it."""
        end = prompt.rstrip()
        if end.endswith(self.opening):
            return Position.INSIDE
        return Position.AFTER if end.endswith(self.closing) else Position.BEFORE

    def prefix(self, position: Position, special_ids: Mapping[str, int], *, is_call: bool = False) -> str:
        """Returns Lark rules of reasoning followed by the rule `answer`; empty without reasoning.

        Args:
            is_call: whether the answer includes its own opening, as grammars of tool calls do.
        """
        if position is Position.AFTER:
            return ""
        if self.closing in special_ids:  # which text cannot contain
            thoughts = [f"thoughts: THOUGHTS? {literal(self.closing, special_ids)}", rf"THOUGHTS: /{ANY}/"]
        else:
            thoughts = [f"thoughts[lazy]: /{ANY}{escape(self.closing)}/"]
        opening = literal(self.opening, special_ids)
        start = "thoughts GAP? answer" if position is Position.INSIDE else f"({opening} thoughts GAP?)? answer"
        return "\n".join([f"start: {start}", *thoughts, r"GAP: /[ \n]{1,4}/"])

    def uses(self, special_ids: Mapping[str, int]) -> bool:
        """Returns whether a special token is among the marks and must stay in the text."""
        return any(token in self.opening or token in self.closing for token in special_ids if token)


MARKS = (
    ReasoningFormat("Mistral", r"\[THINK\]", "[THINK]", "[/THINK]"),
    ReasoningFormat("Gemma 4", r"<\|channel>", "<|channel>thought", "<channel|>"),
    ReasoningFormat("think", "</think>", "<think>", "</think>"),
)
"""Formats with an opening and a closing mark."""


class ReasoningSplitter:
    """Incremental splitter of reasoning and answer. The result does not depend on how the text is split.

    Whitespace around reasoning is dropped. Without an end mark the whole text is reasoning.
    """

    num_calls = 0

    def __init__(self, reasoning: ReasoningFormat, position: Position) -> None:
        self.position = position
        self._format = reasoning
        self._held = ""
        self._blanks = ""
        self._has_reasoning = self._is_behind = False

    @property
    def is_reasoning(self) -> bool:
        return self.position is Position.INSIDE

    def push(self, text: str) -> list[Piece]:
        """Adds text and returns the completed pieces."""
        self._held += text
        pieces: list[Piece] = []
        if self.position is Position.BEFORE:
            self._begin()
        if self.position is Position.INSIDE:
            pieces += self._think()
        if self.position is Position.AFTER:
            pieces += self._pass_text()
        return pieces

    def flush(self) -> list[Piece]:
        """Returns the remaining pieces at the end of input."""
        held, self._held = self._held, ""
        if self.position is Position.INSIDE:
            rest = self._settled(held)
            return [Reasoning(rest)] if rest else []
        return [held] if held else []

    def _begin(self) -> None:
        text, opening = self._held.lstrip(), self._format.opening
        if text.startswith(opening):
            self._held, self.position = text[len(opening) :], Position.INSIDE
        elif not opening.startswith(text):
            self.position = Position.AFTER

    def _think(self) -> list[Piece]:
        text, found, rest = self._held.partition(self._format.closing)
        if found:
            self._held, self.position, self._is_behind = rest, Position.AFTER, True
        else:
            kept = held_back(text, self._format.closing)
            self._held, text = text[len(text) - kept :], text[: len(text) - kept]
        settled = self._settled(text)
        return [Reasoning(settled)] if settled else []

    def _settled(self, text: str) -> str:
        """Returns reasoning without surrounding whitespace, as far as it is known."""
        text = self._blanks + text
        if not self._has_reasoning:
            text = text.lstrip()
        settled = text.rstrip()
        self._blanks = text[len(settled) :]
        self._has_reasoning = self._has_reasoning or bool(settled)
        return settled

    def _pass_text(self) -> list[Piece]:
        """Returns all text, without whitespace directly after reasoning."""
        text = self._held.lstrip() if self._is_behind else self._held
        self._held, self._is_behind = "", self._is_behind and not text
        return [text] if text else []

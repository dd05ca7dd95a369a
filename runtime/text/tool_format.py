"""Formats of tool calls, and their registry."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol
from uuid import uuid4

from compress.common.registry import Registry
from runtime.text.pieces import CallPiece

Tool = Mapping[str, Any]
"""`name`, and `parameters`, a JSON schema of an object; without one the tool has no parameters."""


class ReaderState(Enum):
    """Position of a reader in its call."""

    HEAD = auto()
    """The name is not certain; nothing was consumed."""
    BODY = auto()
    DONE = auto()
    NO_CALL = auto()
    """The text is not a call; nothing was consumed."""


class CallReader(Protocol):
    """Incremental reader of one call. The result does not depend on how the text is split."""

    state: ReaderState

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        """Returns the number of consumed characters and the completed pieces.

        Args:
            text: unconsumed text of the call, possibly followed by other text.
        """

    def flush(self, text: str) -> list[CallPiece]:
        """Returns the remaining pieces of a truncated call, given the unconsumed text."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat(ABC):
    """Format of tool calls: sections of `opening`, one or more calls, `closing`.

    Attributes:
        marks: regular expressions that all occur in the chat templates of this format.
        opening: start of a section of calls.
        closing: end of a section; may be empty.
        separator: separator of calls in a section; None for one call per section.
        section_separator: separator of sections; None for one section per answer.
        bare: first characters of calls that may start an answer without `opening`.
        text_opening: start of text, for formats that mark it.
        id_length: required length of call ids; 0 is any length.
    """

    name: str
    marks: tuple[str, ...]
    opening: str
    closing: str = ""
    separator: str | None = None
    section_separator: str | None = None
    bare: str = ""
    text_opening: str = ""
    id_length: int = 0

    @abstractmethod
    def reader(self, tools: Sequence[Tool], *, is_first: bool) -> CallReader:
        """Returns a reader of the next call; `is_first` marks the first call of a section."""

    @abstractmethod
    def call_rules(self, rule: str, tool: Tool, special_ids: Mapping[str, int]) -> list[str]:
        """Returns Lark rules of one call of a tool; the first defines `rule`.

        Raises:
            RequestError: the format cannot enforce the tool's schema.
        """

    def schema_of_call(self, tool: Tool) -> dict[str, Any]:
        """Returns the JSON schema of a call that is one JSON value; for formats whose `bare` is a brace."""
        raise NotImplementedError

    def new_id(self, name: str, number: int) -> str:
        """Returns an id that the templates of the format accept, given the number of the call in its answer."""
        return uuid4().hex[: self.id_length] if self.id_length else f"call_{uuid4().hex[:24]}"

    def is_used_by(self, template: str) -> bool:
        return all(re.search(mark, template) for mark in self.marks)


TOOL_FORMATS: Registry[ToolFormat] = Registry("tool format", "runtime.text.tool_formats")

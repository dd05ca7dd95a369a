"""How models write tool calls, found out from their chat template, and tools in words for models without any."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.checkpoint.errors import RequestError


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: `opening`, JSON, `closing`.

    Attributes:
        opening: what announces calls.
        closing: what ends a call; may be empty.
        separator: between calls; empty when they need none, or when the JSON is a list of them.
        arguments: the key of a call's arguments, beside `name`.
        is_list: the JSON is a list of calls.
        is_bare: at the beginning of an answer JSON may stand without `opening`.
        id_length: characters of the calls' ids, for templates that insist; 0 leaves it open.
    """

    name: str
    opening: str
    closing: str = ""
    separator: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    is_bare: bool = False
    id_length: int = 0

    @property
    def bracket(self) -> str:
        """What the JSON begins with."""
        return "[" if self.is_list else "{"


HERMES = ToolFormat("Hermes", "<tool_call>", "</tool_call>")
"""Hermes, Qwen 2.5, Qwen 3, and models whose template says nothing about tools."""

LLAMA = ToolFormat("Llama 3.1", "<|python_tag|>", separator=";", arguments="parameters", is_bare=True)
MISTRAL = ToolFormat("Mistral", "[TOOL_CALLS]", is_list=True, is_bare=True, id_length=9)


YOUNGER_FORMS = ("<function=", "<arg_key>", "[ARGS]")
"""What stands in templates whose calls have a tag of an older form, but are no JSON."""


def mentions_tools(template: str) -> bool:
    """Whether the template does something with tools."""
    return re.search(r"\btools\b", template) is not None


def find_format(template: str) -> ToolFormat:
    """The format that a chat template describes; Hermes when it knows no tools.

    Raises:
        RequestError: it knows tools, in a format that is not supported.
    """
    if not mentions_tools(template):
        return HERMES
    if not any(mark in template for mark in YOUNGER_FORMS):
        if HERMES.opening in template:
            return HERMES
        if re.search(r"\[TOOL_CALLS\]\s*\[", template):  # younger templates put a name there
            return MISTRAL
        if LLAMA.opening in template or '"parameters": dictionary' in template:
            return LLAMA
    names = ", ".join(known.name for known in (HERMES, LLAMA, MISTRAL))
    raise RequestError(
        "the model's chat template writes tool calls in an unknown form",
        f"leave tools out, or serve the model with a template of a known form ({names})",
    )


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation in words that any template knows: tools in the system message, calls and results as text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, answer with its name and arguments "
        f'as JSON between tags:\n{HERMES.opening}\n{{"name": "...", "arguments": {{...}}}}\n{HERMES.closing}'
    )
    if plain and plain[0]["role"] == "system":
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without calls, and of a role that every template knows."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f"{HERMES.opening}\n{json.dumps(call, ensure_ascii=False)}\n{HERMES.closing}" for call in calls]
    return {"role": message["role"], "content": "\n".join([content, *texts] if content else texts)}

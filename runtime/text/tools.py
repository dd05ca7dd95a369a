"""Detection of tool call formats by chat templates, and tool descriptions for templates without support."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compress.common.errors import RequestError
from runtime.text.tool_format import TOOL_FORMATS, ToolFormat
from runtime.text.tool_formats.hermes import HERMES


def mentions_tools(template: str) -> bool:
    """Returns whether a template supports tools."""
    return re.search(r"\btools\b", template) is not None


def find_format(template: str) -> ToolFormat:
    """Returns the format that a chat template describes: of those whose marks all occur, the one with the most; Hermes
    if the template does not support tools.

    Raises:
        RequestError: the template supports tools in an unsupported format.
    """
    if not mentions_tools(template):
        return HERMES
    if found := [each for each in TOOL_FORMATS.values() if each.is_used_by(template)]:
        return max(found, key=lambda each: len(each.marks))
    raise RequestError(
        "the model's chat template has an unknown format of tool calls",
        f"leave tools out, or serve the model with a template of a known format ({', '.join(TOOL_FORMATS)})",
    )


def takes_one_call(template: str) -> bool:
    """Returns whether a template writes only the first call of a message, or refuses messages with several."""
    return re.search(r"\btool_calls['\"\]]*\[0\]", template) is not None


def concatenates_arguments(template: str) -> bool:
    """Returns whether a template concatenates the arguments of calls with text; they must then be strings."""
    return re.search(r"\+\s*[\w.\[\]'\"]*\barguments\b['\"\]]*\s*(\+|[-%]?\})", template) is not None


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the conversation for templates without tool support: tools in the system message, calls and results as
    text."""
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
    """Returns a message without calls, with a role that every template supports."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f"{HERMES.opening}\n{json.dumps(call, ensure_ascii=False)}\n{HERMES.closing}" for call in calls]
    return {"role": message["role"], "content": "\n".join([content, *texts] if content else texts)}

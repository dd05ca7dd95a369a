"""Formats of tool calls, detected from chat templates, and a description of tools for templates without support."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.common.errors import RequestError
from runtime.core.request import Grammar, GrammarKind
from runtime.text.grammar import JSON_OPTIONS


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls: `opening`, JSON, `closing`.

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
        """First characters of the JSON."""
        return "[" if self.is_list else "{"


HERMES = ToolFormat("Hermes", "<tool_call>", "</tool_call>")
"""Format of Hermes, Qwen 2.5, Qwen 3, and of models whose template does not support tools."""

LLAMA = ToolFormat("Llama 3.1", "<|python_tag|>", separator=";", arguments="parameters", is_bare=True)
MISTRAL = ToolFormat("Mistral", "[TOOL_CALLS]", is_list=True, is_bare=True, id_length=9)


YOUNGER_FORMS = ("<function=", "<arg_key>", "[ARGS]")
"""Marks of templates whose calls have a known tag but are not JSON."""


def mentions_tools(template: str) -> bool:
    """Returns whether a template supports tools."""
    return re.search(r"\btools\b", template) is not None


def find_format(template: str) -> ToolFormat:
    """Returns the format that a chat template describes; Hermes if it does not support tools.

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
    """Returns the conversation for templates without tools: tools in the system message, calls and results as text."""
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
    """Returns a message without calls, in a role that every template supports."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f"{HERMES.opening}\n{json.dumps(call, ensure_ascii=False)}\n{HERMES.closing}" for call in calls]
    return {"role": message["role"], "content": "\n".join([content, *texts] if content else texts)}


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY = r"(.|\n)*"


def forced_calls(
    tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int], *, several: bool
) -> Grammar:
    """Returns a grammar of answers that consist of one or more calls of these tools.

    Args:
        tools: `{"name": ..., "parameters": schema}`; without a schema a tool has no parameters.
        special_ids: ids of tokens that are no text; a tag among them is written with its token.
        several: allow more than one call.
    """
    rules = _call_rules(tool_format, tools, special_ids, several=several)
    if tool_format.closing:
        start = "opening calls" + _more(' ("\\n" opening calls)*', several)
    else:
        start = 'opening " "? calls' if tool_format.is_list else "calls"
    return _lark(f"start: {start}", f"opening: {_tag(tool_format.opening, special_ids)}", *rules)


def allowed_calls(
    tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int], *, several: bool
) -> Grammar:
    """Returns a grammar of answers with any text, and with valid calls of these tools only.

    Where calls may stand without a tag, answers that begin with their bracket are calls. Arguments as `forced_calls`.
    """
    opening = tool_format.opening
    first = rf"\s*[^\s{re.escape(tool_format.bracket)}]" if tool_format.is_bare else r"(.|\n)"
    if opening in special_ids:  # which no text contains
        rules = [f"opening: TEXT? {_tag(opening, special_ids)}", f"TEXT: /{first}{ANY}/"]
    else:
        tag = re.escape(opening).replace("/", r"\/")
        rules = [f"opening[lazy]: /({first}{ANY})?{tag}/", f"TEXT: /{first}{ANY}/ & ~/{ANY}{tag}{ANY}/"]
    if tool_format.closing:
        start = f"(opening calls){'*' if several else '?'} TEXT?"
    else:
        start = 'calls | opening " "? calls | TEXT?'
    return _lark(f"start: {start}", *rules, *_call_rules(tool_format, tools, special_ids, several=several))


def _call_rules(
    tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int], *, several: bool
) -> list[str]:
    """Returns the rule `calls`: the text after an opening tag, the closing tag included."""
    if tool_format.is_list:
        calls = '"[" call' + _more(' (", " call)*', several) + ' "]"'
    elif tool_format.closing:
        calls = f'"\\n" call "\\n" {_tag(tool_format.closing, special_ids)}'
    else:
        calls = "call" + _more(f' ("{tool_format.separator} " call)*', several)
    rules = [f"calls: {calls}", f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        before = f'{{"name": {json.dumps(tool["name"])}, "{tool_format.arguments}": '
        rules.append(f'call_{index}: {_quote(before)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(_arguments_schema(tool.get('parameters')))}")
    return rules


def _arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    schema = {"type": "object", **parameters} if parameters is not None else NO_PARAMETERS
    return schema | {"x-guidance": JSON_OPTIONS}


def _more(rule: str, several: bool) -> str:
    return rule if several else ""


def _tag(text: str, special_ids: Mapping[str, int]) -> str:
    return f"<[{special_ids[text]}]>" if text in special_ids else _quote(text)


def _quote(text: str) -> str:
    """Returns a string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _lark(*rules: str) -> Grammar:
    return Grammar(GrammarKind.LARK, "\n".join(rules))

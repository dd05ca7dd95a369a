"""Grammars of answers with tool calls, in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.core.request import Grammar, GrammarKind
from runtime.text.json_rules import relax, value_rule
from runtime.text.tool_format import Tool, ToolFormat

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY = r"(.|\n)*"


def forced_calls(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    special_ids: Mapping[str, int],
    *,
    several: bool,
    reply: Mapping[str, Any] | None = None,
) -> Grammar:
    """Returns a grammar of answers that consist of one or more calls of these tools.

    Args:
        special_ids: ids of special tokens; tags among them are matched as tokens.
        several: whether to allow more than one call.
        reply: schema of JSON that an answer may be in place of calls.

    Raises:
        RequestError: the format cannot enforce a tool's schema.
    """
    if (
        reply is not None and tool_format.bare == "{"
    ):  # the lexer cannot tell the bracket of a call from that of a reply
        return lark(f"start: {value_rule(any_of([*map(tool_format.schema_of_call, tools), reply]))}")
    section = section_rules(tool_format, tools, special_ids, several=several)
    start = "calls" if tool_format.bare == "{" else "opening calls"
    if several and tool_format.section_separator is not None:
        start += f" ({literal(tool_format.section_separator, special_ids)} opening calls)*"
    if reply is not None:
        section = [*section, f"reply: {value_rule(reply)}"]
        start += f" | {literal(tool_format.text_opening, special_ids)} reply"
    rules = [f"start: {start}", f"opening: {literal(tool_format.opening, special_ids)}"]
    return lark(*rules, *section)


def allowed_calls(
    tool_format: ToolFormat, tools: Sequence[Tool], special_ids: Mapping[str, int], *, several: bool
) -> Grammar:
    """Returns a grammar of answers with any text, and with valid calls of these tools only.

    If the format allows calls without a tag, answers that start with a bracket are calls. For arguments see
    `forced_calls`.
    """
    opening = tool_format.opening
    section = section_rules(tool_format, tools, special_ids, several=several)
    if tool_format.text_opening:
        final = f"{literal(tool_format.text_opening, special_ids)} TEXT?"
        rules = [f"start: opening calls | {final}", f"opening: {literal(opening, special_ids)}", f"TEXT: /{ANY}/"]
        return lark(*rules, *section)
    first = rf"\s*[^\s{re.escape(tool_format.bare)}]" if tool_format.bare else r"(.|\n)"
    if opening in special_ids:  # which text cannot contain
        rules = [f"opening: TEXT? {literal(opening, special_ids)}", f"TEXT: /{first}{ANY}/"]
    else:
        tag = escape(opening)
        rules = [f"opening[lazy]: /({first}{ANY})?{tag}/", f"TEXT: /{first}{ANY}/ & ~/{ANY}{tag}{ANY}/"]
    repeated = f"(opening calls){'*' if several else '?'} TEXT?"
    start = "calls | opening calls | TEXT?" if tool_format.bare else repeated
    return lark(f"start: {start}", *rules, *section)


def section_rules(
    tool_format: ToolFormat, tools: Sequence[Tool], special_ids: Mapping[str, int], *, several: bool
) -> list[str]:
    """Returns the rule `calls`: the text after an opening tag, including the closing tag."""
    separator, closing = tool_format.separator, literal(tool_format.closing, special_ids)
    more = f"({literal(separator, special_ids)} call)*" if several and separator is not None else ""
    first = '" "? "["' if tool_format.bare == "[" else ""
    rules = [f"calls: {first} call {more} {closing}", f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        enforced = {"parameters": relax(tool["parameters"])[0]} if "parameters" in tool else {}
        rules += tool_format.call_rules(f"call_{index}", {**tool, **enforced}, special_ids)
    return rules


def json_rule(parameters: Mapping[str, Any] | None) -> str:
    """Returns the right side of a rule for arguments that follow a schema."""
    return value_rule(object_schema(parameters))


def object_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the schema of arguments."""
    return {"type": "object", **parameters} if parameters is not None else NO_PARAMETERS


def any_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a schema of which a value follows one of some schemas; references in them stay theirs."""
    return {"anyOf": [relocated(schema, f"#/anyOf/{index}") for index, schema in enumerate(schemas)]}


def relocated(value: Any, place: str) -> Any:
    """Returns a schema whose references to its own root lead to a place in another one."""
    if isinstance(value, list):
        return [relocated(each, place) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {name: relocated(held, place) for name, held in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = place + reference[1:]
    return found


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Returns a text as terminals, with special tokens in it as tokens."""
    special = [token for token in special_ids if token and token in text]
    parts = re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text)
    named = [f"<[{special_ids[part]}]>" if part in special else quote(part) for part in parts if part]
    return " ".join(named if special else [quote(text)] if text else [])


def escape(text: str) -> str:
    """Returns a regular expression between slashes that matches a text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def quote(text: str) -> str:
    """Returns a string literal."""
    return json.dumps(text, ensure_ascii=False)


def lark(*rules: str) -> Grammar:
    return Grammar(GrammarKind.CALLS, "\n".join(rules))

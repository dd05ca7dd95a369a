"""Grammars of answers that call tools: such that must, and such that may but then have to call them rightly."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.sampling_params import Grammar, GrammarKind
from runtime.text.grammar_source import JSON_OPTIONS
from runtime.text.tool_format import ToolFormat

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY = r"(.|\n)*"


def forced_calls(
    tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], special_ids: Mapping[str, int], *, several: bool
) -> Grammar:
    """A grammar of answers that call at least one of these tools, and say nothing else.

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
    """A grammar of answers that may say anything, but call only these tools, with the arguments that they take.

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
    """`calls`: what stands behind an opening tag, the closing one included."""
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
    """A string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _lark(*rules: str) -> Grammar:
    return Grammar(GrammarKind.LARK, "\n".join(rules))

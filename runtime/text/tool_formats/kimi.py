"""Kimi K2: call ids consist of name and number."""

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.text.call_head import WORD
from runtime.text.json_calls import NAME, JsonToolFormat
from runtime.text.tool_format import TOOL_FORMATS, Tool
from runtime.text.tool_grammar import json_rule, literal

CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@dataclass(frozen=True, kw_only=True)
class KimiToolFormat(JsonToolFormat):
    def new_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def call_rules(self, rule: str, tool: Tool, special_ids: Mapping[str, int]) -> list[str]:
        """Returns rules that allow any number after the name."""
        before, middle = literal(f"{CALL}functions.{tool['name']}:", special_ids), literal(ARGUMENTS, special_ids)
        return [
            f"{rule}: {before} /[0-9]{{1,3}}/ {middle} {rule}_arguments {literal(CALL_END, special_ids)}",
            f"{rule}_arguments: {json_rule(tool.get('parameters'))}",
        ]


KIMI = TOOL_FORMATS.register()(
    KimiToolFormat(
        name="Kimi K2",
        marks=(r"<\|tool_calls_section_begin\|>",),
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        separator="",
        heads=((CALL, "functions.", WORD, ":", WORD, ARGUMENTS),),
        before=f"{CALL}functions.{NAME}:0{ARGUMENTS}",
        after=CALL_END,
        tail=(CALL_END,),
    )
)

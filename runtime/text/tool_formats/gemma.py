"""Gemma 4, following the chat template published with its models."""

from runtime.text.bare_key_calls import BareKeyToolFormat
from runtime.text.call_head import WORD
from runtime.text.tool_format import TOOL_FORMATS

GEMMA = TOOL_FORMATS.register()(
    BareKeyToolFormat(
        name="Gemma 4",
        marks=(r"<\|tool_call>call:", r'<\|"\|>'),
        opening="<|tool_call>",
        closing="<tool_call|>",
        section_separator="",
        head=("call:", WORD),
        before="call:NAME",
        quote='<|"|>',
    )
)

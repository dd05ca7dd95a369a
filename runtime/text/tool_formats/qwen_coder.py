"""Qwen3-Coder and later models with its format."""

from runtime.text.call_head import WORD
from runtime.text.tagged_calls import TaggedToolFormat
from runtime.text.tool_format import TOOL_FORMATS

QWEN_CODER = TOOL_FORMATS.register()(
    TaggedToolFormat(
        name="Qwen3-Coder",
        marks=("<tool_call>", "<function="),
        opening="<tool_call>",
        closing="</tool_call>",
        section_separator="\n",
        head=("<function=", WORD, ">"),
        before="\n<function=NAME>\n",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        end="</function>",
        newlines=True,
    )
)

"""Hermes, Qwen 2.5, Qwen 3, and models whose template does not support tools."""

from runtime.text.json_calls import object_format
from runtime.text.tool_format import TOOL_FORMATS

HERMES = TOOL_FORMATS.register()(
    object_format(
        name="Hermes",
        marks=(r"\A(?![\s\S]*(<tool_calls>|<invoke ))[\s\S]*<tool_call>",),  # not lists of calls, not attributes
        opening="<tool_call>",
        closing="</tool_call>",
        before="\n",
        after="\n",
        section_separator="\n",
    )
)

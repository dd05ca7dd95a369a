"""Llama 3.1 to 3.3: JSON, also without a tag."""

from runtime.text.json_calls import object_format
from runtime.text.tool_format import TOOL_FORMATS

LLAMA = TOOL_FORMATS.register()(
    object_format(
        name="Llama 3.1",
        marks=(r'\A(?![\s\S]*<function=)[\s\S]*(<\|python_tag\|>|"parameters": dictionary)',),
        opening="<|python_tag|>",
        separator="; ",
        bare="{",
        key="parameters",
    )
)

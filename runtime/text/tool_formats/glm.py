"""GLM 4.5 to 4.7."""

from runtime.text.call_head import WORD
from runtime.text.tagged_calls import TaggedToolFormat
from runtime.text.tool_format import TOOL_FORMATS

GLM = TOOL_FORMATS.register()(
    TaggedToolFormat(
        name="GLM 4.5",
        marks=("<tool_call>", "<arg_key>"),
        opening="<tool_call>",
        closing="</tool_call>",
        section_separator="\n",
        head=(WORD,),
        before="NAME\n",
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
    )
)

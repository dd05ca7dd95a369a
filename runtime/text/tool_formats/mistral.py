"""Mistral: a list of objects; since Mistral Small 3.2, names before arguments."""

from runtime.text.call_head import WORD
from runtime.text.json_calls import NAME, JsonToolFormat, object_format
from runtime.text.tool_format import TOOL_FORMATS

ID_LENGTH = 9
"""Length of a call id; templates reject other lengths."""

MISTRAL = TOOL_FORMATS.register()(
    object_format(
        name="Mistral",
        marks=(r"\[TOOL_CALLS\]", r"\[TOOL_CALLS\]\s*\["),  # newer templates have a name there
        opening="[TOOL_CALLS]",
        closing="]",
        separator=", ",
        bare="[",
        first="[",
        id_length=ID_LENGTH,
    )
)

MISTRAL_ARGS = TOOL_FORMATS.register()(
    JsonToolFormat(
        name="Mistral 3",
        marks=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
        opening="[TOOL_CALLS]",
        section_separator="",
        heads=((WORD, "[ARGS]"), (WORD, "[CALL_ID]", WORD, "[ARGS]"), (WORD,)),
        before=f"{NAME}[ARGS]",
        id_length=ID_LENGTH,
    )
)

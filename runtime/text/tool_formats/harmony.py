"""gpt-oss: calls are messages to functions."""

from runtime.text.call_head import WORD
from runtime.text.harmony import CHANNEL, FINAL, MESSAGE
from runtime.text.json_calls import NAME, JsonToolFormat
from runtime.text.tool_format import TOOL_FORMATS

HARMONY_CALLS = TOOL_FORMATS.register()(
    JsonToolFormat(
        name="harmony",
        marks=(r"<\|channel\|>commentary", r"functions\."),
        opening=f"{CHANNEL}commentary to=functions.",
        section_separator=None,
        heads=((WORD, "<|constrain|>", "json", MESSAGE), (WORD, "json", MESSAGE), (WORD, MESSAGE)),
        before=f"{NAME} <|constrain|>json{MESSAGE}",
        tail=("<|call|>",),
        text_opening=FINAL,
    )
)

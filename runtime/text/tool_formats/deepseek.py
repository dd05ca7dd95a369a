"""DeepSeek V3 and R1, with arguments in a block of code, and V3.1, without."""

from runtime.text.call_head import WORD
from runtime.text.json_calls import NAME, JsonToolFormat
from runtime.text.tool_format import TOOL_FORMATS

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, BETWEEN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

DEEPSEEK = TOOL_FORMATS.register()(
    JsonToolFormat(
        name="DeepSeek V3",
        marks=(BETWEEN, "```json"),
        opening=CALLS,
        closing=CALLS_END,
        separator="\n",
        heads=((CALL, "function", BETWEEN, WORD, "```json"),),
        before=f"{CALL}function{BETWEEN}{NAME}\n```json\n",
        after=f"\n```{CALL_END}",
        tail=("```", CALL_END),
    )
)

DEEPSEEK_V31 = TOOL_FORMATS.register()(
    JsonToolFormat(
        name="DeepSeek V3.1",
        marks=(BETWEEN,),
        opening=CALLS,
        closing=CALLS_END,
        separator="",
        heads=((CALL, WORD, BETWEEN),),
        before=f"{CALL}{NAME}{BETWEEN}",
        after=CALL_END,
        tail=(CALL_END,),
    )
)

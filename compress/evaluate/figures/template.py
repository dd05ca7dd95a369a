"""Chat templates: whether both folders make the same text and tokens of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.common.errors import RequestError
from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure

if TYPE_CHECKING:
    from compress.evaluate.side import Side

_USER = {"role": "user", "content": "How warm is it in Bergen?"}
_CALL = {
    "type": "function",
    "id": "a1b2c3d4e",
    "function": {"name": "read_weather", "arguments": {"city": "Bergen"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "read_weather",
        "description": "Reads the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_TEXT = "Naïve 3.14 — text,\n\twith <|im_end|> 東京"
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([_USER], {}),
    "system": ([{"role": "system", "content": "Answer in one word.  Ça va?"}, _USER], {}),
    "several turns": ([_USER, {"role": "assistant", "content": "12."}, {"role": "user", "content": "And now?"}], {}),
    "without a generation prompt": ([_USER, {"role": "assistant", "content": "12."}], {"add_generation_prompt": False}),
    "tools": ([_USER], {"tools": [_TOOL]}),
    "tool calls": (
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "read_weather", "tool_call_id": "a1b2c3d4e", "content": '{"degrees": 12}'},
        ],
        {"tools": [_TOOL]},
    ),
}
"""Conversations with the variables of templates, by what they try."""

Rendered = dict[str, tuple[str, tuple[int, ...]]]
"""Text and tokens of each conversation; the refusal and no tokens of one that the template refuses."""


class Templates(MeasuredFigure):
    """Share of conversations that have equal text and tokens by the files of both folders."""

    help = "share of conversations that both chat templates render equally, text and tokens"
    word = "at least"
    usual = 1.0

    def observe(self, side: Side) -> Rendered:
        found: Rendered = {"plain text": ("", tuple(side.tokenizer.encode(_TEXT)))}
        for name, (messages, variables) in CONVERSATIONS.items():
            try:
                text = side.tokenizer.render_chat(messages, **variables)
                found[name] = text, tuple(side.tokenizer.encode(text, add_special_tokens=False))
            except RequestError as error:
                found[name] = error.problem, ()
        return found

    def judge(self, dense: Rendered, packed: Rendered) -> Finding:
        differing = [name for name in dense if dense[name] != packed[name]]
        same = len(dense) - len(differing)
        others = f"; others: {', '.join(differing)}" if differing else ""
        text = f"{same} of {len(dense)} texts are equal{others}"
        refused = [name for name, (_, tokens) in dense.items() if not tokens]
        return Finding(same / len(dense), text, details={"differing": differing, "refused_by_dense": refused})


FIGURES.register("template", order=13)(Templates())

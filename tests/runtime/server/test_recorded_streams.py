"""Streams have the bytes of those in `tests/data/streams`; a file that is deleted is written again."""

import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compress.common.cli import demo_model_path
from runtime.core.request import Delta, FinishReason, SamplingParams, TokenLogprobs
from runtime.server.answers import Answer, ChoicesAnswer
from runtime.server.protocol.generation import Delivery
from runtime.server.routes.chat import PreparedChat
from runtime.server.routes.completions import CompletionShape
from runtime.server.routes.messages import MessageAnswer
from runtime.server.routes.responses import ResponseAnswer
from runtime.text.answer_form import AnswerForm, find_reasoning
from runtime.text.reasoning import Position
from runtime.text.tokenizer import Tokenizer
from runtime.text.tools import find_format

RECORDED = Path(__file__).parents[2] / "data" / "streams"
TOKENIZER = Tokenizer.open(demo_model_path())
SAID = 'In %s? \0 "é"\N{SNOWMAN}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ürzig 9%"}}\n</tool_call>'
PARTS = f"{SAID}\n</think>\n\n{SAID}{CALL}"
TOOL = {"name": "weather", "parameters": {"properties": {"city": {}}}}
FORM = AnswerForm(find_format("<tool_call>{tool_calls}"), [TOOL], reasoning=find_reasoning("</think>"))
FORM = AnswerForm(FORM.tool_format, [TOOL], reasoning=FORM.reasoning, position=Position.INSIDE)


def deltas(said: str, *, logprobs: bool, num_answers: int) -> Iterator[Delta]:
    """Yields the tokens of a text, some of them together or without a text of their own; the last one is cut off."""
    token_ids = TOKENIZER.encode(said)
    for index in range(num_answers):
        text, done = TOKENIZER.detokenizer(()), 0
        while done < len(token_ids):
            new = token_ids[done : done + 1 + done % 3]
            done += len(new)
            delta = Delta(
                "1", "".join(map(text.push, new)), new, num_output_tokens=done, num_prompt_tokens=7, index=index
            )
            if logprobs:
                top = [(new[0], -0.25), (300 + done, float("-inf"))]
                delta.logprobs = [TokenLogprobs(-0.1 * token_id, tuple(top)) for token_id in new]
            if done >= len(token_ids):
                delta.text += text.flush()
                delta.finish_reason = FinishReason.LENGTH if index else FinishReason.STOP
            yield delta


def chat(form: AnswerForm, *, logprobs: bool, num_answers: int = 1) -> PreparedChat:
    options = {"user": None, "num_answers": num_answers, "stream": True, "include_usage": True}
    delivery = Delivery(model="m", priority=0, cache_salt="", **options)
    return PreparedChat(delivery, array("i", [7]), SamplingParams(), logprobs, form)


def chat_answer(form: AnswerForm, *, logprobs: bool) -> Answer:
    shape = chat(form, logprobs=logprobs, num_answers=2).shape(TOKENIZER)
    return ChoicesAnswer({"id": "chatcmpl-1", "created": 1, "model": "m"}, shape, 2, 2, include_usage=True)


def completion_answer(*, logprobs: bool) -> Answer:
    shape = CompletionShape(TOKENIZER, [], logprobs)
    return ChoicesAnswer({"id": "cmpl-1", "created": 1, "model": "m"}, shape, 2, 2, include_usage=True)


def response_answer(form: AnswerForm, *, logprobs: bool) -> Answer:
    return ResponseAnswer(
        {"id": "resp_1", "object": "response", "model": "m"}, chat(form, logprobs=logprobs), TOKENIZER
    )


PLAIN = AnswerForm()
ANSWERS: dict[str, tuple[Callable[[], Answer], int, bool]] = {
    "completions": (lambda: completion_answer(logprobs=False), 2, False),
    "completions-logprobs": (lambda: completion_answer(logprobs=True), 2, True),
    "chat": (lambda: chat_answer(PLAIN, logprobs=False), 2, False),
    "chat-logprobs": (lambda: chat_answer(PLAIN, logprobs=True), 2, True),
    "chat-parts": (lambda: chat_answer(FORM, logprobs=False), 2, False),
    "chat-parts-logprobs": (lambda: chat_answer(FORM, logprobs=True), 1, True),
    "messages-parts": (lambda: MessageAnswer({"id": "msg_1", "model": "m"}, chat(FORM, logprobs=False)), 1, False),
    "responses": (lambda: response_answer(PLAIN, logprobs=False), 1, False),
    "responses-logprobs": (lambda: response_answer(PLAIN, logprobs=True), 1, True),
    "responses-parts": (lambda: response_answer(FORM, logprobs=False), 1, False),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_streams_are_the_recorded_ones(name: str) -> None:
    new_answer, num_answers, logprobs = ANSWERS[name]
    answer, written = new_answer(), []
    said = PARTS if "parts" in name else SAID
    for delta in deltas(said, logprobs=logprobs, num_answers=num_answers):
        written += [*([] if written else [answer.begin(delta)]), answer.write(delta)]
    found = re.sub(rb'[0-9a-f]{32}|(?<=:"call_)\w+', b"ID", b"".join([*written, answer.end(None)]))
    recorded = RECORDED / f"{name}.txt"
    if not recorded.exists():
        recorded.write_bytes(found)
        pytest.fail(f"{recorded} was not there, and is written")
    assert found == recorded.read_bytes()

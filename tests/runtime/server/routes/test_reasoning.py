"""Reasoning in chats and messages: apart from the answer, left in or left out, streamed, counted, sent back."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import openai_schema
import pytest
import tokenizers
from chat_templates import FAMILIES, NAMED_TOKENS
from fake_runner import FakeRunner
from servers import events, serving_engine

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, FinishReason, TokenLogprobs
from runtime.engine.engine import Engine
from runtime.server.conversation import conversation_texts
from runtime.server.protocol.chat import ChatRequest
from runtime.server.routes.chat import ParsedShape
from runtime.text.answer_form import AnswerForm, find_reasoning
from runtime.text.reasoning import Position
from runtime.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "How is the weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHTS = "Rome, in the\nmorning"
QWEN = f"<think>\n{THOUGHTS}\n</think>\n\nSunny."
HARMONY = f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|channel|>final<|message|>Sunny."


def tokenizer_of(family: str, **special: str) -> Tokenizer:
    """The demo model's tokenizer with a family's template, and with other special tokens."""
    text = (demo_model_path() / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in special.items():
        text = text.replace(f"<|{old}|>", new)
    return Tokenizer(tokenizers.Tokenizer.from_str(text), NAMED_TOKENS, FAMILIES[family].template)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Callable[..., httpx.Client]]:
    """Servers of a family whose model writes what it is told to."""
    with ExitStack() as stack:

        def start(family: str, script: str, **special: str) -> httpx.Client:
            tokenizer = tokenizer_of(family, **special)
            runner = FakeRunner(num_blocks=1024, block_size=16, max_model_len=4000, eos_token_ids=frozenset({0}))
            runner.vocab_size = tokenizer.vocab_size
            runner.script = [*tokenizer.encode(script), 0]
            engine = Engine(runner, tokenizer, RuntimeConfig(block_size=16))
            url = stack.enter_context(serving_engine(engine, tokenizer))
            return stack.enter_context(httpx.Client(base_url=url, timeout=60))

        yield start


@pytest.fixture(scope="module")
def qwen(scripted: Any) -> httpx.Client:
    return scripted("qwen3", QWEN)


def ask(api: httpx.Client, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choice and usage of an answer, which the stream equals."""
    body = {"model": "demo", "messages": MESSAGES, **fields}
    answer = api.post(CHAT, json=body).json()
    openai_schema.validate(answer, "CreateChatCompletionResponse")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(api.post(CHAT, json={**body, **options}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = answer["choices"][0]["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert "prompt_tokens_details" in last["usage"]
    assert {**last["usage"], "prompt_tokens_details": 0} == {**answer["usage"], "prompt_tokens_details": 0}
    return answer["choices"][0], answer["usage"]


def test_reasoning_is_apart_and_counted(qwen: httpx.Client) -> None:
    choice, usage = ask(qwen)
    assert choice["message"]["content"] == "Sunny."
    assert choice["message"]["reasoning_content"] == THOUGHTS
    tokenizer = tokenizer_of("qwen3")
    num_tokens = len(tokenizer.encode(f"<think>\n{THOUGHTS}\n</think>"))
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_tokens - counted <= len(tokenizer.encode("<think>"))


def test_reasoning_can_be_left_in_and_left_out(qwen: httpx.Client) -> None:
    choice, usage = ask(qwen, separate_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": QWEN, "refusal": None}
    assert "completion_tokens_details" not in usage
    choice, usage = ask(qwen, include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": "Sunny.", "refusal": None}
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    both = {"separate_reasoning": False, "include_reasoning": False}
    assert qwen.post(CHAT, json={"model": "demo", "messages": MESSAGES, **both}).status_code == 400


def test_log_probabilities_are_those_of_all_tokens() -> None:
    """In the order of the tokens, those of reasoning and marks included, whatever part of the text they are."""
    tokenizer = tokenizer_of("qwen3")
    tokens = tokenizer.encode(QWEN)
    form = AnswerForm(reasoning=find_reasoning("</think>"), position=Position.BEFORE)
    shape = ParsedShape(tokenizer, with_logprobs=True, num_choices=1, form=form)
    texts = tokenizer.detokenizer()
    deltas = [Delta("1", texts.push(token), [token], [TokenLogprobs(-1.0)]) for token in tokens]
    deltas[-1].finish_reason = FinishReason.STOP
    parts = [part for delta in deltas for part in shape.parts(0, delta)]
    chunks = [part.choice(*map(json.loads, part.values)) for part in parts]
    found = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
    assert b"".join(bytes(token["bytes"]) for token in found).decode() == QWEN
    assert len(found) == len(tokens)


def test_reasoning_that_is_cut_off_and_a_prompt_that_ends_it(qwen: httpx.Client) -> None:
    choice, _ = ask(qwen, max_tokens=12)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert THOUGHTS.startswith(choice["message"]["reasoning_content"])
    choice, _ = ask(qwen, chat_template_kwargs={"enable_thinking": False})
    assert choice["message"]["content"] == QWEN  # the prompt has ended it
    continued = [*MESSAGES, {"role": "assistant", "content": "<think>\nWell"}]
    choice, _ = ask(qwen, messages=continued, continue_final_message=True)
    assert choice["message"]["reasoning_content"] == f"<think>\n{THOUGHTS}"


@pytest.mark.full
def test_reasoning_calls_and_special_tokens(scripted: Any) -> None:
    for api in (scripted("qwen3", f"{QWEN}\n{CALL}"), scripted("qwen3", f"{QWEN}\n{CALL}", im_start="<think>")):
        choice, _ = ask(api, tools=TOOLS)
        assert choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (THOUGHTS, "Sunny.")
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        choice, _ = ask(api)
        assert choice["message"]["content"] == f"Sunny.\n{CALL}"


@pytest.mark.full
def test_channels(scripted: Any) -> None:
    api = scripted("gpt_oss", HARMONY, im_start="<|channel|>")
    choice, usage = ask(api)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (THOUGHTS, "Sunny.")
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    call = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}'
    choice, _ = ask(scripted("gpt_oss", call, im_start="<|channel|>"), tools=TOOLS)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


@pytest.mark.full
def test_thinking_blocks(scripted: Any) -> None:
    api = scripted("qwen3", f"{QWEN}\n{CALL}")
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    client = anthropic.Anthropic(base_url=str(api.base_url), api_key="none", max_retries=0)
    options: Any = {"model": "demo", "max_tokens": 200, "messages": MESSAGES, "tools": tools}
    kinds = ["thinking", "text", "tool_use"]
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        whole = client.messages.create(**options, thinking=thinking)
        assert [block.type for block in whole.content] == kinds
        assert (whole.content[0].thinking, whole.content[0].signature) == (THOUGHTS, "")
        with client.messages.stream(**options, thinking=thinking) as stream:
            streamed = stream.get_final_message()
        dumped = [[block.model_dump(exclude={"id"}) for block in each.content] for each in (streamed, whole)]
        assert [{name: block[name] for name in found} for block, found in zip(*dumped, strict=True)] == dumped[1]
    assert [block.type for block in client.messages.create(**options).content] == kinds[1:]
    omitted = client.messages.create(**options, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in omitted.content] == kinds[1:]
    off = client.messages.create(**options, thinking={"type": "disabled"})
    assert off.content[0].text.startswith("<think>")  # after a prompt that ends reasoning, all is text
    turns = [*MESSAGES, {"role": "assistant", "content": [block.model_dump() for block in whole.content[:2]]}]
    turns[1]["content"] = [{k: v for k, v in block.items() if v is not None} for block in turns[1]["content"]]
    with_thoughts = client.messages.count_tokens(model="demo", messages=[*turns, *MESSAGES]).input_tokens
    redacted = {"type": "redacted_thinking", "data": "x"}
    turns[1]["content"][0] = redacted
    assert client.messages.count_tokens(model="demo", messages=[*turns, *MESSAGES]).input_tokens < with_thoughts


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", "<think>\nHm\n</think>\n\nYes"),
        ("ministral3", "[THINK]Hm[/THINK]Yes"),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm<|end|>"),
        ("kimi_k2", "<|im_middle|>Yes<|im_end|>"),
    ],
)
def test_templates_get_the_reasoning_they_read(family: str, expected: str, name: str) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Yes", name: "Hm"}, *MESSAGES]
    body = ChatRequest.model_validate({"model": "demo", "messages": turns})
    assert expected in "".join(conversation_texts(tokenizer_of(family), body))
    with pytest.raises(ValueError, match="only messages of the assistant"):
        ChatRequest.model_validate({"model": "demo", "messages": [{"role": "user", "content": "a", name: "b"}]})


@pytest.mark.full
def test_a_form_of_the_answer_begins_behind_reasoning(scripted: Any) -> None:
    """The grammar limits what the model writes: it keeps to its script only if the grammar begins after reasoning."""
    answer = '{"a": 1}'
    api = scripted("deepseek_r1", f"Hm {{\n</think>\n\n{answer}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    choice, _ = ask(api, response_format=form)
    assert json.loads(choice["message"]["content"]) == {"a": 1}
    assert choice["message"]["reasoning_content"] == "Hm {"

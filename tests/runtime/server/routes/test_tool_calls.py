"""Tool calls as the official client sees them: forced from the demo model, and scripted in each format."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import openai_schema
import pytest
import tokenizers
from chat_templates import FAMILIES, NAMED_TOKENS
from covering import sample
from fake_runner import FakeRunner
from jsonschema import validate
from servers import serving_demo, serving_engine

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.engine.engine import Engine
from runtime.server.conversation import conversation_texts
from runtime.server.protocol.chat import ChatRequest
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_format import TOOL_FORMATS
from runtime.text.tools import concatenates_arguments

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather to come", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


BROKEN_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{x"}}

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]

ROME = {"city": "Rome", "days": 2}
CALLS = [("weather", ROME), ("now", {})]
KINDS = [
    pytest.param(kind, marks=() if kind in ("qwen3", "llama3", "qwen3_coder") else pytest.mark.full)
    for kind in FAMILIES
]
SPECIAL = {
    "llama3": "<|python_tag|>",
    "mistral_v3": "[TOOL_CALLS]",
    "ministral3": "[TOOL_CALLS]",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "gemma4": "<|tool_call>",
}
"""Tags that are special tokens."""


def script_of(kind: str) -> str:
    """Two calls after a sentence, as the family's template writes them; Llama writes calls only."""
    family = FAMILIES[kind]
    turn = {"role": "assistant", "content": "" if kind == "llama3" else "Let me see.", "tool_calls": calls_of(kind)}
    text = family.written([*MESSAGES, turn], TOOLS).lstrip("\n")
    return f"<|python_tag|>{text}" if kind == "llama3" else text


def calls_of(kind: str) -> list[Any]:
    as_text = concatenates_arguments(FAMILIES[kind].template)
    functions = [{"name": name, "arguments": json.dumps(held) if as_text else held} for name, held in CALLS]
    new_id = TOOL_FORMATS[FAMILIES[kind].name].new_id
    return [
        {"id": new_id(each["name"], number), "type": "function", "function": each}
        for number, each in enumerate(functions)
    ]


def plain(kind: str) -> dict[str, Any]:
    """Options of a request whose answer has no reasoning."""
    return {"extra_body": {"chat_template_kwargs": FAMILIES[kind].plain}} if FAMILIES[kind].plain else {}


def tokenizer_of(kind: str) -> Tokenizer:
    """The demo model's tokenizer with another template, and with the tag as a special token where models have one."""
    text = (demo_model_path() / "tokenizer.json").read_text(encoding="utf-8")
    backend = tokenizers.Tokenizer.from_str(text.replace("<|im_start|>", SPECIAL.get(kind, "<|im_start|>")))
    return Tokenizer(backend, NAMED_TOKENS, FAMILIES[kind].template)


class Answers:
    """Answer to one request, whole or as a stream: both must be equal."""

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, **options: Any) -> Any:
        options = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "seed": 1, **options}
        answer = self.client.chat.completions.create(**options)
        openai_schema.validate(answer.model_dump(exclude_unset=True), "CreateChatCompletionResponse")
        streamed = self.stream(options)
        for choice in answer.choices:
            calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
            assert streamed[choice.index] == (choice.message.content or "", calls, choice.finish_reason)
            ids = [call.id for call in choice.message.tool_calls or []]
            assert len(set(ids)) == len(ids)
        return answer

    def stream(self, options: dict[str, Any]) -> dict[int, tuple[str, list[tuple[str, str]], str]]:
        texts: dict[int, str] = {}
        calls: dict[int, list[list[str]]] = {}
        reasons: dict[int, str] = {}
        for chunk in self.client.chat.completions.create(**options, stream=True):
            openai_schema.validate(chunk.model_dump(exclude_unset=True), "CreateChatCompletionStreamResponse")
            choice = chunk.choices[0]
            found = calls.setdefault(choice.index, [])
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            for part in choice.delta.tool_calls or []:
                if part.index == len(found):
                    assert part.id
                    assert part.type == "function"
                    assert part.function.arguments == ""
                    found.append([part.function.name, ""])
                else:
                    assert (part.id, part.type, part.function.name) == (None, None, None)
                found[part.index][1] += part.function.arguments
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
        return {i: (texts[i], [(name, text) for name, text in calls[i]], reasons[i]) for i in reasons}


@pytest.fixture(scope="module")
def demo() -> Iterator[Answers]:
    """The demo model. Its own template knows no tools."""
    with serving_demo(num_blocks=512) as (url, *_):
        yield Answers(url)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Callable[[str, str], Answers]]:
    """Servers of a format whose model says what it is told to."""
    with ExitStack() as stack:

        def start(kind: str, script: str) -> Answers:
            tokenizer = tokenizer_of(kind)
            runner = FakeRunner(num_blocks=1024, block_size=16, max_model_len=4000, eos_token_ids=frozenset({0}))
            runner.vocab_size = tokenizer.vocab_size
            runner.script = [*tokenizer.encode(script), 0]
            engine = Engine(runner, tokenizer, RuntimeConfig(block_size=16))
            return Answers(stack.enter_context(serving_engine(engine, tokenizer)))

        yield start


@pytest.mark.parametrize("seed", sample(range(4)))
def test_required_gives_a_valid_call(demo: Answers, seed: int) -> None:
    choice = demo.ask(tool_choice="required", seed=seed, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name in ("weather", "now")
    validate(json.loads(call.function.arguments), WEATHER if call.function.name == "weather" else {"maxProperties": 0})


def test_a_named_tool_is_called_once(demo: Answers) -> None:
    for choice in demo.ask(tool_choice=NAMED, n=3, temperature=1.5).choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        validate(json.loads(call.function.arguments), WEATHER)


def allowed(mode: str, *names: str) -> Any:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def test_a_choice_may_allow_some_of_the_tools(demo: Answers) -> None:
    for choice in demo.ask(tool_choice=allowed("required", "now"), n=3, parallel_tool_calls=False).choices:
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    free = demo.ask(tool_choice=allowed("auto", "now"), max_tokens=12)
    assert free.choices == demo.ask(tools=TOOLS[1:], max_tokens=12).choices
    with pytest.raises(openai.BadRequestError, match="'other'"):
        demo.ask(tool_choice=allowed("auto", "now", "other"))


def test_with_a_form_an_answer_is_a_call_or_has_the_form(scripted: Any) -> None:
    """The model may only write what the grammar allows."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}}
    called = scripted("qwen3", script_of("qwen3").removeprefix("Let me see.\n"))
    choice = called.ask(response_format=form, **plain("qwen3")).choices[0]
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == CALLS
    said = scripted("qwen3", '{"a": [1, "b"]}').ask(response_format=form, **plain("qwen3")).choices[0]
    assert (said.finish_reason, said.message.tool_calls) == ("stop", None)
    assert json.loads(said.message.content) == {"a": [1, "b"]}


@pytest.mark.full
def test_several_calls_at_once(demo: Answers) -> None:
    """A model that may not end goes on calling until it is cut off."""
    choice = demo.ask(tool_choice="required", max_tokens=150, extra_body={"ignore_eos": True}).choices[0]
    assert choice.finish_reason == "length"
    assert len(choice.message.tool_calls) > 1
    assert {call.function.name for call in choice.message.tool_calls} <= {"weather", "now"}


def test_a_call_that_is_cut_off_is_text(demo: Answers) -> None:
    choice = demo.ask(tool_choice=NAMED, max_tokens=4).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert "<tool_call>".startswith(choice.message.content[:4])


def test_without_a_choice_the_model_is_free_and_none_hides_the_tools(demo: Answers) -> None:
    auto = demo.ask(max_tokens=12)
    none = demo.ask(tool_choice="none", max_tokens=12)
    plain = demo.client.chat.completions.create(model="demo", messages=MESSAGES, seed=1, max_tokens=12)
    assert auto.usage.prompt_tokens > none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content


def test_strict_tools_change_no_text(demo: Answers) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    assert demo.ask(tools=strict, max_tokens=12).choices == demo.ask(max_tokens=12).choices
    broken = {"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}}
    strict[0]["function"]["parameters"] = broken
    with pytest.raises(openai.BadRequestError, match="dynamicRef"):
        demo.client.chat.completions.create(model="demo", messages=MESSAGES, tools=strict)


def test_log_probabilities_of_calls(demo: Answers) -> None:
    choice = demo.ask(tool_choice=NAMED, logprobs=True).choices[0]
    said = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
    assert said.startswith("<tool_call>\n{")


def test_a_whole_round(demo: Answers) -> None:
    """The client's own message object goes back as it came, followed by the result."""
    message = demo.ask(tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    answer = demo.client.chat.completions.create(
        model="demo", messages=[*MESSAGES, message, result], tools=TOOLS, max_tokens=5
    )
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_found_in_what_the_model_says(scripted: Any, kind: str) -> None:
    answers = scripted(kind, script_of(kind))
    choice = answers.ask(**plain(kind)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (None if kind == "llama3" else "Let me see.")
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == CALLS
    one = answers.ask(parallel_tool_calls=False, **plain(kind)).choices[0].message
    assert [call.function.name for call in one.tool_calls] == ["weather"]
    untold = answers.client.chat.completions.create(model="demo", messages=MESSAGES, **plain(kind)).choices[0]
    assert untold.finish_reason == "stop"  # no tools were given, so it is text
    assert "Rome" in untold.message.content


def test_a_call_is_streamed_as_it_is_written(scripted: Any) -> None:
    """One chunk per token of the arguments, between the name and the reason."""
    client = scripted("qwen3", script_of("qwen3")).client
    chunks = client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    parts = [part.function for delta in deltas for part in delta.tool_calls or []]
    assert [part.name for part in parts if part.name] == ["weather", "now"]
    first = [part.arguments for part in parts[1:] if not part.name][: len(parts) - 3]
    assert len(first) > 5
    assert all(len(delta.tool_calls or []) <= 1 for delta in deltas)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_no_call_stays_text(scripted: Any, kind: str) -> None:
    text = 'I would say {"name": 3} or [1, 2]; <tool_call> is a tag, and\n\nthat is it. '
    choice = scripted(kind, text).ask(**plain(kind)).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_templates_get_tools_and_calls_and_results(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    call = calls_of(kind)[0]
    call = {**call, "function": {"name": "weather", "arguments": json.dumps(ROME)}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "sunny"}]},
    ]
    body = ChatRequest.model_validate({"model": "demo", "messages": turns, "tools": TOOLS})
    (prompt,) = conversation_texts(tokenizer, body)
    expected = FAMILIES[kind].render(
        [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls_of(kind)[:1]}]
    )
    assert expected.rpartition("Rome")[0].rpartition("weather")[2] in prompt
    assert "sunny" in prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "only together with tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, r"tools\[0\]\.function\.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "object"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, r"tools\[0\]\.type"),
        ({"tools": None, "tool_choice": "required"}, "only together with tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"messages\[0\]\.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, r"messages\[0\]\.tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]}, r"tool_calls\[0\]\.function\.arguments"),
    ],
)
def test_requests_that_make_no_sense(demo: Answers, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        demo.client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, "tools": TOOLS, **fields})
    assert re.search(words, refusal.value.message)


def test_parameters_that_no_grammar_can_keep_to_are_refused_when_a_call_is_forced(demo: Answers) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "items": {"$recursiveRef": "#"}}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(openai.BadRequestError, match="recursiveRef"):
        demo.client.chat.completions.create(model="demo", messages=MESSAGES, tools=tools, tool_choice="required")


def test_a_template_of_an_unknown_form_is_refused() -> None:
    backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    tokenizer = Tokenizer(backend, {}, "{{ tools }} in a form of its own {{ messages }}")
    engine = Engine(FakeRunner(), tokenizer, RuntimeConfig(block_size=4))
    with serving_engine(engine, tokenizer) as url, pytest.raises(openai.BadRequestError, match="tools"):
        Answers(url).ask()

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
from covering import sample
from fake_runner import FakeRunner
from jsonschema import validate
from servers import serving_demo, serving_engine

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.engine.engine import Engine
from runtime.server.conversation import conversation_texts
from runtime.server.protocol_chat import ChatRequest
from runtime.text.tokenizer import Tokenizer

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


BROKEN_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]

TURNS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}CALL{% endfor %}
{% endfor %}"""
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }} <tool_call></tool_call>{% endif %}"
    + TURNS.replace("CALL", "<tool_call>{{ call.function | tojson }}</tool_call>"),
    "llama": "{% if tools %}{{ tools | tojson }} <|python_tag|>{% endif %}"
    + TURNS.replace(
        "CALL", '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    ),
    "mistral": "{% if tools %}{{ tools | tojson }} {% endif %}"
    + TURNS.replace("CALL", "[TOOL_CALLS] [{{ call.function | tojson }}]"),
}
SPECIAL = {"hermes": "<|im_start|>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
ROME = {"city": "Rome", "days": 2}
SCRIPTS = {
    "hermes": "Let me see.\n<tool_call>\n"
    + json.dumps({"name": "weather", "arguments": ROME})
    + '\n</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama": '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome", "days": 2}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 2}}, '
    '{"name": "now", "arguments": {}}]',
}


def tokenizer_of(kind: str) -> Tokenizer:
    """The demo model's tokenizer with another template, and with the tag as a special token where models have one."""
    text = (demo_model_path() / "tokenizer.json").read_text(encoding="utf-8")
    backend = tokenizers.Tokenizer.from_str(text.replace("<|im_start|>", SPECIAL[kind]))
    return Tokenizer(backend, {}, TEMPLATES[kind])


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
                    found.append([part.function.name, ""])
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
    broken = {"type": "object", "properties": {"a": {"not": {}}}}
    strict[0]["function"]["parameters"] = broken
    with pytest.raises(openai.BadRequestError, match="not"):
        demo.client.chat.completions.create(model="demo", messages=MESSAGES, tools=strict)


def test_log_probabilities_of_calls(demo: Answers) -> None:
    choice = demo.ask(tool_choice=NAMED, logprobs=True).choices[0]
    said = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
    assert said.startswith("<tool_call>\n{")


def test_a_whole_round(demo: Answers) -> None:
    """The client's own message object goes back as it came, with the result behind it."""
    message = demo.ask(tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    answer = demo.client.chat.completions.create(
        model="demo", messages=[*MESSAGES, message, result], tools=TOOLS, max_tokens=5
    )
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_are_found_in_what_the_model_says(scripted: Any, kind: str) -> None:
    answers = scripted(kind, SCRIPTS[kind])
    choice = answers.ask().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (None if kind == "llama" else "Let me see.")
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [
        ("weather", ROME),
        ("now", {}),
    ]
    one = answers.ask(parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in one.tool_calls] == ["weather"]
    untold = answers.client.chat.completions.create(model="demo", messages=MESSAGES).choices[0]
    assert untold.finish_reason == "stop"  # no tools were given, so it is text
    assert '"name": "weather"' in untold.message.content


@pytest.mark.parametrize("kind", TEMPLATES)
def test_text_that_is_no_call_stays_text(scripted: Any, kind: str) -> None:
    text = 'I would say {"name": 3} or [1, 2]; <tool_call> is a tag, and\n\nthat is it. '
    choice = scripted(kind, text).ask().choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_get_tools_and_calls_and_results(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    call = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ROME)}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": [{"type": "text", "text": "sunny"}]},
    ]
    body = ChatRequest.model_validate({"model": "demo", "messages": turns, "tools": TOOLS})
    (prompt,) = conversation_texts(tokenizer, body)
    assert '"description": "Weather to come"' in prompt
    assert f'"{"parameters" if kind == "llama" else "arguments"}": {json.dumps(ROME)}' in prompt
    assert "<tool>sunny" in prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, r"tools\[0\]\.function\.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "object"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, r"tools\[0\]\.type"),
        ({"tools": None, "tool_choice": "required"}, "only together with tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
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
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        demo.client.chat.completions.create(model="demo", messages=MESSAGES, tools=tools, tool_choice="required")


def test_a_template_of_an_unknown_form_is_refused() -> None:
    backend = tokenizers.Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    tokenizer = Tokenizer(backend, {}, "{{ tools }} in a form of its own {{ messages }}")
    engine = Engine(FakeRunner(), tokenizer, RuntimeConfig(block_size=4))
    with serving_engine(engine, tokenizer) as url, pytest.raises(openai.BadRequestError, match="tools"):
        Answers(url).ask()

"""`/v1/messages` with Anthropic's own client and by hand."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

TURNS = [{"role": "user", "content": "Tell a story"}]
WEATHER = {
    "name": "weather",
    "description": "Weather to come",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 0}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
BY_CLIENT = {"model": "demo", "max_tokens": 12, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(demo_server: tuple[str, Any, Any]) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=demo_server[0], api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def post(demo_server: tuple[str, Any, Any]) -> Iterator[Any]:
    with httpx.Client(base_url=demo_server[0], timeout=60) as found:
        yield lambda path, **body: found.post(path, json=body)


def chat_text(post: Any, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = post("/v1/chat/completions", **{**GREEDY, "messages": messages, **fields}).json()
    return answer["choices"][0]["message"]["content"]


def test_the_text_is_that_of_a_chat(client: Any, post: Any) -> None:
    found = client.messages.create(**BY_CLIENT, system="Be brief", messages=TURNS)
    expected = chat_text(post, [{"role": "system", "content": "Be brief"}, *TURNS])
    assert [block.text for block in found.content] == [expected]
    assert (found.type, found.role, found.stop_reason) == ("message", "assistant", "max_tokens")
    assert found.usage.output_tokens == 12
    counted = client.messages.count_tokens(model="demo", system="Be brief", messages=TURNS)
    assert counted.input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens


@pytest.mark.full
def test_streams_are_the_same_message(client: Any) -> None:
    whole = client.messages.create(**BY_CLIENT, messages=TURNS)
    with client.messages.stream(**BY_CLIENT, messages=TURNS) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text
    assert last.content[0].text == text
    assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_messages_of_one_role_in_a_row_are_one_turn(post: Any) -> None:
    def count(*turns: tuple[str, Any]) -> int:
        messages = [{"role": role, "content": content} for role, content in turns]
        return post("/v1/messages/count_tokens", model="demo", messages=messages).json()["input_tokens"]

    asked, said = ("user", "Tell a story"), ("assistant", "Once")
    assert count(asked, ("user", "Now"), said, asked) == count(("user", "Tell a story\nNow"), said, asked)
    result = ("user", [RESULT | {"content": "sunny"}])
    called = ("assistant", [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}])
    text = [{"type": "text", "text": "Go on"}]
    assert count(asked, called, result, ("user", "Go on")) == count(asked, called, ("user", [*result[1], *text]))


def test_fields_that_change_nothing(post: Any) -> None:
    tool = {**WEATHER, "eager_input_streaming": True, "defer_loading": False}
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {}, "caller": {"type": "direct"}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "Hm", "citations": []}, use]}
    turns = [*TURNS, said, {"role": "user", "content": [RESULT]}]
    fields = {"inference_geo": "us", "speed": "standard", "service_tier": "auto"}
    sent = post("/v1/messages", **GREEDY, **fields, messages=turns, tools=[tool])
    assert sent.status_code == 200, sent.text
    said["content"] = [{"type": "text", "text": "Hm"}, {**use, "caller": None}]
    assert sent.json()["content"] == post("/v1/messages", **GREEDY, messages=turns, tools=[WEATHER]).json()["content"]
    assert post("/v1/messages", **GREEDY, messages=TURNS, tool_choice={"type": "auto"}).status_code == 200


def test_the_runner_of_tools_sends_whole_conversations(client: Any) -> None:
    """It asks the server to keep the conversation, and goes on without where the server says that it keeps none."""

    @anthropic.beta_tool
    def now() -> str:
        """Says the time."""
        return "noon"

    fields: dict[str, Any] = {"model": "demo", "max_tokens": 60, "messages": TURNS, "tools": [now]}
    one = {"type": "any", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(**fields, tool_choice=one, max_iterations=2)
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]


@pytest.mark.full
def test_a_stop_sequence_is_named(client: Any) -> None:
    text = client.messages.create(**BY_CLIENT, messages=TURNS).content[0].text
    stop = text[5:8]
    found = client.messages.create(**BY_CLIENT, messages=TURNS, stop_sequences=["\0", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]


@pytest.mark.full
def test_the_last_message_of_the_assistant_is_continued(client: Any, post: Any) -> None:
    begun = [*TURNS, {"role": "assistant", "content": "Once upon a"}]
    found = client.messages.create(**BY_CLIENT, messages=begun)
    assert found.content[0].text == chat_text(post, begun, continue_final_message=True)


@pytest.mark.full
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_its_result_read(client: Any, streams: bool) -> None:
    options = {**BY_CLIENT, "max_tokens": 100, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    if streams:
        with client.messages.stream(**options, messages=TURNS) as stream:
            found = stream.get_final_message()
    else:
        found = client.messages.create(**options, messages=TURNS)
    assert found.stop_reason == "tool_use"
    call = next(block for block in found.content if block.type == "tool_use")
    assert call.name == "weather"
    assert call.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*TURNS, {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]}]
    after = client.messages.create(
        **BY_CLIENT, messages=[*turns, {"role": "user", "content": [result]}], tools=[WEATHER]
    )
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > 30


@pytest.mark.full
def test_the_arguments_of_a_call_are_streamed(client: Any) -> None:
    options = {**BY_CLIENT, "max_tokens": 100, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    whole = client.messages.create(**options, messages=TURNS).content[0]
    with client.messages.stream(**options, messages=TURNS) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
    assert len(parts) > 2
    assert json.loads("".join(parts)) == whole.input


@pytest.mark.full
def test_a_call_that_is_cut_off_has_the_input_so_far(client: Any) -> None:
    options = {**BY_CLIENT, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    for max_tokens in range(1, 40):
        found = client.messages.create(**{**options, "max_tokens": max_tokens}, messages=TURNS)
        if found.content[0].type == "tool_use":
            break
    assert (found.content[0].input, found.stop_reason) == ({}, "max_tokens")


@pytest.mark.full
def test_a_form_of_the_answer(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}}
    found = client.messages.create(**{**BY_CLIENT, "max_tokens": 60}, messages=TURNS, output_config=form)
    assert json.loads(found.content[0].text)["n"] in (1, 2)


def test_events_come_in_order(demo_server: tuple[str, Any, Any]) -> None:
    body = {**GREEDY, "messages": TURNS, "stream": True}
    lines = httpx.post(f"{demo_server[0]}/v1/messages", json=body, timeout=60).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    payloads = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [payload["type"] for payload in payloads] == names


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"model": "other"}, "other"),
        ({"messages": []}, "messages"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "budget_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
            "tool_result",
        ),
    ],
)
def test_what_it_cannot_do_is_said(post: Any, change: dict[str, Any], words: str) -> None:
    response = post("/v1/messages", **{**GREEDY, "messages": TURNS, **change})
    assert response.status_code in (400, 404)
    assert words in response.json()["error"]["message"]
    assert response.json()["type"] == "error"

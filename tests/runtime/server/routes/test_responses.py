"""`/v1/responses` with OpenAI's own client and types, and by hand."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from compress.common.cli import demo_model_path
from runtime.core.request import FinishReason
from runtime.server.routes.chat import TokenFrames
from runtime.server.routes.protocol_responses import ResponsesRequest
from runtime.server.routes.response_items import ItemWriter
from runtime.text.answer_form import AnswerForm, find_reasoning
from runtime.text.reasoning import Position
from runtime.text.tokenizer import Tokenizer

EVENT = TypeAdapter(ResponseStreamEvent)
GREEDY: dict[str, Any] = {"model": "demo", "max_output_tokens": 12, "temperature": 0}
STORY = "Tell a story"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather to come",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def http(demo_server: tuple[str, Any, Any]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_server[0], timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def client(demo_server: tuple[str, Any, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server[0]}/v1", api_key="none", max_retries=0) as found:
        yield found


def respond(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/responses", json={**GREEDY, **fields})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json(), strict=False)
    return response.json()


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return parsed(http.post("/v1/responses", json={**GREEDY, **fields, "stream": True}).text)


def parsed(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    for each in found:
        EVENT.validate_python(each)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def chat_text(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = {"model": "demo", "max_tokens": 12, "temperature": 0, "messages": messages, **fields}
    return http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {**response, "output": items, "id": "", "created_at": 0}


def test_the_text_is_that_of_a_chat(http: httpx.Client) -> None:
    found = respond(http, input=STORY, instructions="Be brief")
    system, user = {"role": "system", "content": "Be brief"}, {"role": "user", "content": STORY}
    (message,) = found["output"]
    assert message["content"][0]["text"] == chat_text(http, [system, user])
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 12
    assert (found["instructions"], found["store"], found["tools"]) == ("Be brief", False, [])


def test_items_of_answers_can_be_sent_back(http: httpx.Client) -> None:
    first = respond(http, input=STORY)
    text = first["output"][0]["content"][0]["text"]
    turns = [{"role": "user", "content": STORY}, *first["output"], {"role": "user", "content": "Go on"}]
    expected = chat_text(
        http,
        [
            {"role": "user", "content": STORY},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Go on"},
        ],
    )
    assert respond(http, input=turns)["output"][0]["content"][0]["text"] == expected


def test_streams_tell_of_the_same_response(http: httpx.Client) -> None:
    found = events(http, input=STORY)
    names, whole = [each["type"] for each in found], respond(http, input=STORY)
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole['status']}",
    ]
    last = found[-1]["response"]
    last["usage"]["input_tokens_details"] = whole["usage"]["input_tokens_details"]  # cached by now
    assert without_ids(last) == without_ids(whole)
    joined = "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
    assert joined == whole["output"][0]["content"][0]["text"]


@pytest.mark.full
def test_calls_are_items(http: httpx.Client) -> None:
    fields = {"input": "Weather in Rome?", "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 60}
    fields["parallel_tool_calls"] = False
    (call,) = respond(http, **fields)["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    found = events(http, **fields)
    joined = "".join(each["delta"] for each in found if each["type"] == "response.function_call_arguments.delta")
    assert joined == call["arguments"]
    assert found[-1]["response"]["output"][0]["arguments"] == call["arguments"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    again = respond(http, input=[{"role": "user", "content": fields["input"]}, call, result], tools=[WEATHER])
    assert again["usage"]["input_tokens"] > 0


@pytest.mark.full
def test_structured_answers(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    found = respond(http, input=STORY, text=text, max_output_tokens=200)
    assert json.loads(found["output"][0]["content"][0]["text"])["a"] in (1, 2)
    assert (found["status"], found["text"]["format"]["name"]) == ("completed", "answer")


@pytest.mark.full
def test_log_probabilities(http: httpx.Client) -> None:
    fields = {"input": STORY, "include": LOGPROBS, "top_logprobs": 2}
    whole = respond(http, **fields)["output"][0]["content"][0]["logprobs"]
    streamed = [
        entry for each in events(http, **fields) if each["type"].endswith("text.delta") for entry in each["logprobs"]
    ]
    assert len(whole) == len(streamed) > 3
    assert [entry["token"] for entry in whole] == [entry["token"] for entry in streamed]
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)


@pytest.mark.full
def test_by_the_client(client: openai.OpenAI, http: httpx.Client) -> None:
    expected = respond(http, input=STORY)["output"][0]["content"][0]["text"]
    assert client.responses.create(**GREEDY, input=STORY).output_text == expected
    with client.responses.stream(**GREEDY, input=STORY) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "content": []}]}, "input has nothing but reasoning"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": LOGPROBS, "tools": [WEATHER]}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "only with"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http: httpx.Client, change: dict[str, Any], said: str) -> None:
    response = http.post("/v1/responses", json={**GREEDY, "input": STORY, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert said in f"{error['param']} {error['message']}"


def test_a_choice_may_allow_some_of_the_tools(http: httpx.Client) -> None:
    named = [{"type": "function", "name": WEATHER["name"]}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": named}
    fields = {"input": STORY, "tools": [WEATHER, {"type": "function", "name": "now"}], "max_output_tokens": 60}
    found = respond(http, **fields, tool_choice=choice, parallel_tool_calls=False)
    assert [item["name"] for item in found["output"]] == [WEATHER["name"]]
    assert found["tool_choice"] == choice


THINKING = AnswerForm(reasoning=find_reasoning("<think> </think>"), position=Position.BEFORE)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_is_an_item_of_its_own(size: int) -> None:
    text, writer = "<think>Rome?</think>In Rome.", ItemWriter(THINKING, TokenFrames(Tokenizer.open(demo_model_path())))
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    reasons = [*[None] * (len(pieces) - 1), FinishReason.STOP]
    written = b"".join(each for pair in zip(pieces, reasons, strict=True) for each in writer.push(*pair))
    told = parsed(written.decode())
    thought, message = writer.items
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Rome?")
    assert (message["type"], message["content"][0]["text"]) == ("message", "In Rome.")
    joined = "".join(each["delta"] for each in told if each["type"] == "response.reasoning_text.delta")
    assert joined == "Rome?"
    names = [each["type"].removeprefix("response.") for each in told if each["output_index"] == 0]
    parts = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    assert list(dict.fromkeys(names)) == ["output_item.added", *parts, "output_item.done"]


def test_reasoning_that_is_sent_back_goes_into_the_next_message() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": "Hello"},
    ]
    body = ResponsesRequest.model_validate({"model": "demo", "input": items})
    assert body.as_chat()["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"},
    ]

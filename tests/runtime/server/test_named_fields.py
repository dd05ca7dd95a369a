"""Refusals name the field as the client wrote it, in bodies whose values may have several forms, too."""

from typing import Any

import httpx
import pytest

TURN = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/messages": {"messages": [TURN], "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
}
CHAT, MESSAGES, RESPONSES, RERANK, SCORE = BODIES
CALL = {"type": "function_call", "call_id": "1", "name": "f"}
TOOL = {"type": "function", "function": {"name": "f"}}


def blocks(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": ["Hi"]}, "messages[0]"),
        (CHAT, {"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function"),
        (CHAT, {"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
        (CHAT, {"guided_json": 5}, "guided_json"),
        (CHAT, {"stop": {"a": 1}}, "stop"),
        (MESSAGES, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (MESSAGES, {"messages": blocks("Hi")}, "messages[0].content[0]"),
        (MESSAGES, {"messages": blocks({"text": "Hi"})}, "messages[0].content[0].type"),
        (MESSAGES, {"messages": blocks({"type": "image"})}, "messages[0].content[0].type"),
        (MESSAGES, {"messages": blocks({"type": "text"})}, "messages[0].content[0].text"),
        (MESSAGES, {"messages": blocks({"type": "text", "text": 5})}, "messages[0].content[0].text"),
        (MESSAGES, {"messages": blocks({"type": "text", "text": "a", "mark": 1})}, "messages[0].content[0].mark"),
        (MESSAGES, {"system": [{"type": "text", "text": "a", "mark": 1}]}, "system[0].mark"),
        (MESSAGES, {"system": {"text": "a"}}, "system"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"reasoning_effort": "lowest"}, "reasoning_effort"),
        (MESSAGES, {"output_config": {"effort": "lowest"}}, "output_config.effort"),
        (RESPONSES, {"reasoning": {"effort": "lowest"}}, "reasoning.effort"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        (RESPONSES, {"max_output_tokens": 10**6}, "max_output_tokens"),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
            "tools[0].parameters",
        ),
        (RESPONSES, {"input": [{**CALL, "arguments": "{x"}]}, "input[0].arguments"),
        (RESPONSES, {"input": 5}, "input"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": ["Hi"]}, "input[0]"),
        (RESPONSES, {"input": [None]}, "input[0]"),
        (RESPONSES, {"input": [{"type": 5}]}, "input[0].type"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (RESPONSES, {"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        (RESPONSES, {"input": blocks({"type": "input_image"})}, "input[0].content[0].type"),
        (RESPONSES, {"input": blocks({"type": "input_text"})}, "input[0].content[0].text"),
        (RERANK, {"documents": [5]}, "documents[0]"),
        (RERANK, {"documents": [{"text": "a", "title": "b"}]}, "documents[0].title"),
        (SCORE, {"text_2": ["a", 5]}, "text_2[1]"),
    ],
)
def test_the_field_has_the_name_that_was_sent(api: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    response = api.post(path, json={"model": "alphabet", **BODIES[path], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param.removesuffix(".type") in error["message"]
    assert "lambda" not in error["message"]

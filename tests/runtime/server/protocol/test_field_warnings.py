"""Harmless fields that are not followed are taken, and named in a header of the answer and in the log."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chat_templates import read
from jsonschema import validate

from runtime.server.intake import ServedText
from runtime.server.protocol.chat import ChatRequest
from runtime.server.protocol.field_warnings import WARNING_HEADER, chat_warnings, schema_warnings
from runtime.server.protocol.generation import CompletionRequest
from runtime.server.routes.chat import prepare_chat
from runtime.server.routes.completions import prepare_completion
from runtime.server.routes.messages import prepare_message
from runtime.server.routes.responses import prepare_response
from runtime.server.serving import Limits
from runtime.text.tool_grammar import forced_calls
from runtime.text.tools import find_format

MESSAGES = [{"role": "user", "content": "A few numbers?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "format": "color"},
        "list": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3, "uniqueItems": True},
    },
    "required": ["name", "list"],
    "additionalProperties": False,
}
RELAXED = "format, uniqueItems not enforced"
NAMED = {"name": "answer", "schema": SCHEMA}
TOOL = {"name": "find", "parameters": SCHEMA, "strict": True}
FORCED = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "A", "max_tokens": 80},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 80},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 80},
    "/v1/responses": {"input": "A few numbers?", "max_output_tokens": 80},
}
COMPLETIONS, CHAT, MESSAGE, RESPONSE = BODIES
UNREAD = "the chat template has no such variable"


@pytest.fixture
def http(demo_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_server[0], timeout=60) as client:
        yield client


def texts_of(value: Any) -> Iterator[str]:
    """Texts of an answer, in whatever form."""
    for key, held in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key in ("text", "content", "arguments") and isinstance(held, str):
            yield held
        yield from texts_of(held)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "warning"),
    [
        (CHAT, {"reasoning_effort": "low"}, f"reasoning_effort: {UNREAD}"),
        (MESSAGE, {"output_config": {"effort": "low"}}, f"output_config.effort: {UNREAD}"),
        (RESPONSE, {"reasoning": {"effort": "low"}}, f"reasoning.effort: {UNREAD}"),
        (MESSAGE, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: "),
        (RESPONSE, {"truncation": "auto"}, "truncation: "),
        (COMPLETIONS, {"guided_json": SCHEMA}, f"guided_json: {RELAXED}"),
        (COMPLETIONS, {"guided_json": json.dumps(SCHEMA)}, f"guided_json: {RELAXED}"),
        (COMPLETIONS, {"structured_outputs": {"json": SCHEMA}}, f"structured_outputs.json: {RELAXED}"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, f"response_format: {RELAXED}"),
        (CHAT, FORCED, f"tools: {RELAXED}"),
        (CHAT, FORCED | {"tool_choice": "auto"}, f"tools: {RELAXED}"),
        (MESSAGE, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format: "),
        (RESPONSE, {"text": {"format": {"type": "json_schema", **NAMED}}}, f"text.format: {RELAXED}"),
    ],
)
def test_what_is_not_followed_is_named(
    http: httpx.Client, path: str, fields: Any, warning: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    response = http.post(path, json={"model": "demo", **BODIES[path], **fields, "stream": stream})
    assert response.status_code == 200, response.text
    assert response.headers[WARNING_HEADER].startswith(warning)
    assert len([line for line in caplog.messages if response.headers[WARNING_HEADER] in line]) == 1
    if "ormat:" in warning and not stream:
        (text,) = (text for text in texts_of(response.json()) if text.startswith("{"))
        validate(json.loads(text), SCHEMA | {"properties": {"list": {"items": {"enum": [1, 2, 3]}}, "name": {}}})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"tools": [{"type": "function", "function": {**TOOL, "strict": False}}]}),
        (MESSAGE, {"context_management": {"edits": []}, "thinking": {"type": "disabled"}}),
        (RESPONSE, {"truncation": "disabled", "reasoning": {"summary": "auto"}}),
        (COMPLETIONS, {"guided_json": {"type": "integer", "uniqueItems": False}}),
    ],
)
def test_nothing_is_named_where_all_is_followed(http: httpx.Client, path: str, fields: Any) -> None:
    response = http.post(path, json={"model": "demo", **BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert WARNING_HEADER not in response.headers


def test_an_effort_reaches_a_template_that_has_it() -> None:
    body = ChatRequest.model_validate({"model": "a", "messages": MESSAGES, "reasoning_effort": "low"})
    assert chat_warnings(body, {"reasoning_effort"}) == {}
    assert chat_warnings(body, set()).keys() == {"reasoning_effort"}


def test_tokens_are_counted_with_an_effort(http: httpx.Client) -> None:
    body = {"model": "demo", "messages": MESSAGES}
    plain, effort = (
        http.post("/v1/messages/count_tokens", json=body | more).json()
        for more in ({}, {"output_config": {"effort": "low"}, "context_management": {"edits": [{"type": "x"}]}})
    )
    assert plain == effort


def test_a_response_says_that_nothing_is_truncated(http: httpx.Client) -> None:
    body = {"model": "demo", "input": "word " * 5000, "truncation": "auto", "max_output_tokens": 4}
    assert http.post(RESPONSE, json=body).json()["error"]["code"] == "context_length_exceeded"
    assert http.post(RESPONSE, json=body | {"input": "Hi"}).json()["truncation"] == "disabled"


PREPARE: dict[str, Any] = {
    COMPLETIONS: lambda *body: prepare_completion(*body).samplings[0],
    CHAT: lambda *body: prepare_chat(*body).sampling,
    MESSAGE: lambda *body: prepare_message(*body).sampling,
    RESPONSE: lambda *body: prepare_response(*body).chat.sampling,
}
FORMS = [
    (COMPLETIONS, {"guided_json": SCHEMA}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, FORCED),
    (MESSAGE, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (RESPONSE, {"text": {"format": {"type": "json_schema", **NAMED}}}),
]


@pytest.mark.parametrize(("path", "fields"), FORMS)
def test_json_is_compact_and_a_field_turns_it_off(demo_server: Any, path: str, fields: Any) -> None:
    served = ServedText(demo_server[2], "demo", Limits(2048))
    for value, expected in ((None, False), (True, False), (False, True)):
        body = {"model": "demo", **BODIES[path], **fields, "disable_any_whitespace": value}
        grammar = PREPARE[path](served, json.dumps(body).encode()).grammar
        assert grammar.any_whitespace == expected


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
def test_the_demo_model_indents_where_it_may(http: httpx.Client, form: Any) -> None:
    path, fields = form
    for value in (True, False):
        body = {"model": "demo", **BODIES[path], **fields, "temperature": 0, "disable_any_whitespace": value}
        (text,) = (text for text in texts_of(http.post(path, json=body).json()) if text.startswith("{"))
        assert ("\n" in text) != value


def test_structured_outputs_have_the_field_too(http: httpx.Client) -> None:
    nested = {"json": SCHEMA, "disable_any_whitespace": False}
    body = CompletionRequest.model_validate({"model": "demo", "prompt": "A", "structured_outputs": nested})
    assert body.any_whitespace
    assert body.grammar is not None
    assert body.grammar.any_whitespace
    assert schema_warnings(body).keys() == {"structured_outputs.json"}


def test_ten_thousand_values_over_http(http: httpx.Client) -> None:
    values = [f"value {number}" for number in range(10_000)]
    body = {"model": "demo", "prompt": "A", "max_tokens": 20, "guided_json": {"enum": values}}
    (choice,) = http.post(COMPLETIONS, json=body).json()["choices"]
    assert json.loads(choice["text"]) in values


@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder", "glm45", "gemma4", "llama3", "kimi_k2"])
def test_each_format_of_calls_takes_what_cannot_be_enforced(name: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}, "not": {}}
    parameters |= {"dependentRequired": {}, "propertyNames": {"maxLength": 3}}
    assert forced_calls(find_format(read(name)), [{"name": "f", "parameters": parameters}], {}, several=False)

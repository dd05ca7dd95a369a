"""Every answer validates against the schema that OpenAI publishes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from jsonschema import ValidationError
from openai_schema import NULL_BEFORE_THE_END, NULL_WITHOUT_CONTEXT, validate

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 4}
CHAT = {"model": "alphabet", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

COMPLETIONS = [
    {},
    {"n": 3},
    {"prompt": ["Y", "Z"], "n": 2},
    {"prompt": [1, 2, 3]},
    {"logprobs": 0},
    {"logprobs": 2},
    {"logprobs": 2, "n": 2},
    {"echo": True},
    {"stop": "p", "temperature": 0, "seed": 3, "user": "Ann"},
]
CHATS = [{}, {"n": 3}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"max_completion_tokens": 4}]


def answer(api: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = api.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(api: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with api.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("fields", COMPLETIONS)
def test_completions(api: httpx.Client, fields: dict[str, Any]) -> None:
    whole = answer(api, "/v1/completions", {**COMPLETION, **fields})
    validate(whole, "CreateCompletionResponse")


@pytest.mark.parametrize("fields", COMPLETIONS)
@pytest.mark.parametrize("usage", [{"stream": True}, USAGE])
def test_streamed_completions(api: httpx.Client, fields: dict[str, Any], usage: dict[str, Any]) -> None:
    *parts, last = chunks(api, "/v1/completions", {**COMPLETION, **fields, **usage})
    for part in parts:
        validate(part, "CreateCompletionResponse", NULL_BEFORE_THE_END)
    validate(last, "CreateCompletionResponse")  # the end of a stream needs no exceptions
    assert {part["id"] for part in parts} == {last["id"]}


@pytest.mark.parametrize("fields", CHATS)
def test_chats(api: httpx.Client, fields: dict[str, Any]) -> None:
    validate(answer(api, "/v1/chat/completions", {**CHAT, **fields}), "CreateChatCompletionResponse")


@pytest.mark.parametrize("fields", CHATS)
@pytest.mark.parametrize("usage", [{"stream": True}, USAGE])
def test_streamed_chats(api: httpx.Client, fields: dict[str, Any], usage: dict[str, Any]) -> None:
    parts = chunks(api, "/v1/chat/completions", {**CHAT, **fields, **usage})
    for part in parts:
        may_be_null = ("usage",) if usage is USAGE and part is not parts[-1] else ()
        validate(part, "CreateChatCompletionStreamResponse", may_be_null)
    assert (parts[-1]["choices"] == []) is (usage is USAGE)


@pytest.mark.parametrize("stream", [False, True])
def test_scored_prompts(api: httpx.Client, stream: bool) -> None:
    body = {**COMPLETION, "prompt": ["AZ", "Z"], "echo": True, "logprobs": 2, "stream": stream}
    answers = chunks(api, "/v1/completions", body) if stream else [answer(api, "/v1/completions", body)]
    exceptions = NULL_WITHOUT_CONTEXT + (NULL_BEFORE_THE_END if stream else ())
    for part in answers:
        validate(part, "CreateCompletionResponse", exceptions)


@pytest.mark.parametrize("inputs", ["Z", ["Y", "Z"], [1, 2], [[1], [2, 3]]])
def test_embeddings(api: httpx.Client, inputs: Any) -> None:
    validate(answer(api, "/v1/embeddings", {"model": "alphabet", "input": inputs}), "CreateEmbeddingResponse")


def test_models(api: httpx.Client) -> None:
    validate(api.get("/v1/models").json(), "ListModelsResponse")
    validate(api.get("/v1/models/alphabet").json(), "Model")


@pytest.mark.parametrize(
    ("status", "method", "path", "body"),
    [
        (400, "POST", "/v1/completions", {**COMPLETION, "temperature": 9}),
        (400, "POST", "/v1/completions", [1]),
        (400, "POST", "/v1/chat/completions", {**CHAT, "beams": 2}),
        (400, "POST", "/v1/completions", {**COMPLETION, "prompt": "x" * 200}),
        (404, "POST", "/v1/completions", {**COMPLETION, "model": "other"}),
        (404, "GET", "/v1/models/other", None),
        (404, "GET", "/nowhere", None),
        (405, "PUT", "/v1/completions", COMPLETION),
        (413, "POST", "/v1/completions", {**COMPLETION, "prompt": "x" * 20_000}),
    ],
)
def test_errors(api: httpx.Client, status: int, method: str, path: str, body: Any) -> None:
    response = api.request(method, path, json=body)
    assert response.status_code == status
    validate(response.json(), "ErrorResponse")


def test_error_of_a_missing_key(guarded_api: httpx.Client) -> None:
    response = guarded_api.get("/v1/models")
    assert response.status_code == 401
    validate(response.json(), "ErrorResponse")


def test_error_before_and_in_the_middle_of_a_stream(api: httpx.Client, engine: Any) -> None:
    engine.fail_after = 0
    response = api.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    validate(response.json(), "ErrorResponse")
    engine.fail_after = 2
    validate(chunks(api, "/v1/completions", {**COMPLETION, "stream": True})[-1], "ErrorResponse")


def test_the_validators_are_not_blind(api: httpx.Client) -> None:
    good = answer(api, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    for spoil in (
        lambda a: a.pop("id"),
        lambda a: a.update(object="text_completion"),
        lambda a: a.update(created="today"),
        lambda a: a["choices"][0].update(finish_reason=None),
        lambda a: a["choices"][0]["message"].pop("refusal"),
        lambda a: a["choices"][0]["message"].update(role="robot"),
        lambda a: a["choices"][0]["logprobs"]["content"][0].pop("top_logprobs"),
        lambda a: a["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0].update(bytes=["a"]),
        lambda a: a["usage"].update(total_tokens=1.5),
    ):
        bad = json.loads(json.dumps(good))
        spoil(bad)
        with pytest.raises(ValidationError):
            validate(bad, "CreateChatCompletionResponse")
    for value, places in ((None, ()), (0, NULL_BEFORE_THE_END + NULL_WITHOUT_CONTEXT)):
        whole = answer(api, "/v1/completions", {**COMPLETION, "logprobs": 1})
        whole["choices"][0]["finish_reason"] = value
        with pytest.raises(ValidationError):
            validate(whole, "CreateCompletionResponse", places)

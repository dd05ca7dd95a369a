"""Every answer validates against the schema that OpenAI publishes."""

import json
from typing import Any

import httpx
import pytest
from jsonschema import ValidationError
from openai_schema import NULL_BEFORE_THE_END, NULL_WITHOUT_CONTEXT, validate
from servers import answer, streamed

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 4}
CHAT = {"model": "alphabet", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
USAGE = {"stream_options": {"include_usage": True}}

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


@pytest.mark.parametrize("fields", COMPLETIONS)
def test_completions(api: httpx.Client, fields: dict[str, Any]) -> None:
    validate(answer(api, "/v1/completions", **COMPLETION | fields), "CreateCompletionResponse")


@pytest.mark.parametrize("fields", COMPLETIONS)
@pytest.mark.parametrize("usage", [{}, USAGE])
def test_streamed_completions(api: httpx.Client, fields: dict[str, Any], usage: dict[str, Any]) -> None:
    *parts, last = streamed(api, "/v1/completions", **COMPLETION | fields | usage)
    for part in parts:
        validate(part, "CreateCompletionResponse", NULL_BEFORE_THE_END)
    validate(last, "CreateCompletionResponse")  # the end of a stream needs no exceptions
    assert {part["id"] for part in parts} == {last["id"]}


@pytest.mark.parametrize("fields", CHATS)
def test_chats(api: httpx.Client, fields: dict[str, Any]) -> None:
    validate(answer(api, "/v1/chat/completions", **CHAT | fields), "CreateChatCompletionResponse")


@pytest.mark.parametrize("fields", CHATS)
@pytest.mark.parametrize("usage", [{}, USAGE])
def test_streamed_chats(api: httpx.Client, fields: dict[str, Any], usage: dict[str, Any]) -> None:
    parts = streamed(api, "/v1/chat/completions", **CHAT | fields | usage)
    for part in parts:
        may_be_null = ("usage",) if usage is USAGE and part is not parts[-1] else ()
        validate(part, "CreateChatCompletionStreamResponse", may_be_null)
    assert (parts[-1]["choices"] == []) is (usage is USAGE)


def test_scored_prompts(api: httpx.Client) -> None:
    body = {**COMPLETION, "prompt": ["AZ", "Z"], "echo": True, "logprobs": 2}
    validate(answer(api, "/v1/completions", **body), "CreateCompletionResponse", NULL_WITHOUT_CONTEXT)
    for part in streamed(api, "/v1/completions", **body):
        validate(part, "CreateCompletionResponse", NULL_WITHOUT_CONTEXT + NULL_BEFORE_THE_END)


def test_models(api: httpx.Client) -> None:
    validate(api.get("/v1/models").json(), "ListModelsResponse")
    validate(api.get("/v1/models/alphabet").json(), "Model")


def test_the_validators_are_not_blind(api: httpx.Client) -> None:
    good = answer(api, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2)
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
        whole = answer(api, "/v1/completions", **COMPLETION, logprobs=1)
        whole["choices"][0]["finish_reason"] = value
        with pytest.raises(ValidationError):
            validate(whole, "CreateCompletionResponse", places)

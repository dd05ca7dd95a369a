"""Fields that clients send out of habit change no answer, and those that would are refused with what to do instead."""

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from runtime.core.config import Limits
from runtime.core.request import MAX_SEED
from runtime.server.intake import ServedText
from runtime.server.protocol.accepted_fields import REFUSED, AcceptedFields, DefaultFields
from runtime.server.protocol.chat import ChatRequest
from runtime.server.protocol.generation import CompletionRequest
from runtime.server.routes.completions import prepare_completion
from runtime.server.routes.protocol_messages import AnthropicTool

MESSAGES = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/completions": {"model": "alphabet", "prompt": "A", "max_tokens": 5},
    "/v1/chat/completions": {"model": "alphabet", "messages": MESSAGES, "max_tokens": 5},
}
HABITS: dict[str, Any] = {
    "metadata": {"run": "7"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "a user",
    "prompt_cache_key": "a key",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "30m"},
    "verbosity": "low",
    "modalities": ["text"],
}
DEFAULTS: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "guided_decoding_backend": "xgrammar",
    "cache_prompt": True,
}
VALUES_OF_OTHERS: dict[str, Any] = {"top_k": -1, "echo": False}
OF_CHATS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "add_special_tokens": False,
    "logprobs": False,
    "top_logprobs": 0,
}


@pytest.mark.parametrize("path", PATHS)
def test_fields_of_habit_change_no_answer(api: httpx.Client, path: str) -> None:
    assert HABITS.keys() == AcceptedFields.model_fields.keys()
    assert DEFAULTS.keys() == DefaultFields.model_fields.keys()
    fields = HABITS | DEFAULTS | VALUES_OF_OTHERS | (OF_CHATS if "messages" in PATHS[path] else {})
    plain, sent = (api.post(path, json=PATHS[path] | more) for more in ({}, fields))
    assert sent.status_code == 200, sent.text
    assert sent.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "prompt_cache_breakpoint": {}}]},
        {"role": "assistant", "content": "Hi", "tool_calls": [], "annotations": [], "refusal": None, "audio": None},
    ],
)
def test_messages_may_have_what_other_servers_write(turn: dict[str, Any]) -> None:
    plain = ChatRequest.model_validate({"model": "a", "messages": [{"role": turn["role"], "content": "Hi"}]})
    sent = ChatRequest.model_validate({"model": "a", "messages": [turn]})
    assert sent.messages[0].as_json() == plain.messages[0].as_json()


@pytest.mark.parametrize(
    ("text", "arguments"), [("", {}), ("{", {}), ('{"a": [1, 2], "b": "c', {"a": [1, 2]}), ('{"a": "ü"}', {"a": "ü"})]
)
def test_a_call_may_have_an_index_and_arguments_that_were_cut_off(text: str, arguments: dict[str, Any]) -> None:
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    body = ChatRequest.model_validate({"model": "a", "messages": [{"role": "assistant", "tool_calls": [call]}]})
    (written,) = body.messages[0].as_json()["tool_calls"]
    assert written == {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("name", ["include_obfuscation", "continuous_usage_stats"])
def test_options_of_streams(api: httpx.Client, name: str) -> None:
    options = {"include_usage": True, name: False}
    body = {**PATHS["/v1/completions"], "stream": True, "stream_options": options}
    response = api.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert '"completion_tokens":5' in response.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", {"run": 7}),
        ("metadata", {str(number): "" for number in range(17)}),
        ("store", "yes"),
        ("service_tier", "fast"),
        ("verbosity", "loud"),
        ("modalities", ["text", "audio"]),
        ("modalities", ["audio"]),
        ("prompt_cache_key", "a" * 513),
        ("prompt_cache_retention", "1h"),
        ("use_beam_search", True),
        ("return_token_ids", True),
    ],
)
def test_their_values_are_checked(api: httpx.Client, name: str, value: Any) -> None:
    response = api.post("/v1/completions", json=PATHS["/v1/completions"] | {name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(name)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", PATHS)
def test_refusals_say_what_to_do_instead(api: httpx.Client, path: str, name: str) -> None:
    error = api.post(path, json=PATHS[path] | {name: 1}).json()["error"]
    assert error["param"] == name
    assert REFUSED[name] in error["message"]


def test_negative_seeds_are_seeds(api: httpx.Client) -> None:
    for seed, taken in ((-1, MAX_SEED), (-(2**63), 0), (5, 5)):
        body = CompletionRequest.model_validate(PATHS["/v1/completions"] | {"seed": seed})
        assert body.sampling_params(1, 64, None).seed == taken
    assert api.post("/v1/completions", json=PATHS["/v1/completions"] | {"seed": -1}).status_code == 200


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    body = {"model": "alphabet", "messages": MESSAGES, "reasoning_effort": "low"}
    both = body | {"chat_template_kwargs": {"enable_thinking": True}}
    assert ChatRequest.model_validate(both).template_variables == {"reasoning_effort": "low", "enable_thinking": True}
    with pytest.raises(ValueError, match="give one"):
        ChatRequest.model_validate(body | {"chat_template_kwargs": {"reasoning_effort": "high"}})


class BeginningTokenizer:
    """Encodes texts as their bytes, after 0 as the beginning."""

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())


@pytest.mark.parametrize(("field", "first"), [({}, 0), ({"add_special_tokens": False}, 65)])
def test_prompts_begin_as_asked(field: dict[str, Any], first: int) -> None:
    served = ServedText(BeginningTokenizer(), "alphabet", Limits(64))
    raw = json.dumps(PATHS["/v1/completions"] | field).encode()
    assert prepare_completion(served, raw).prompts[0][0] == first


@pytest.mark.parametrize("value", [0, 0.0, 1, "false", []])
def test_only_the_boolean_is_false(value: object) -> None:
    with pytest.raises(ValidationError):
        AnthropicTool.model_validate({"name": "a", "input_schema": {}, "defer_loading": value})

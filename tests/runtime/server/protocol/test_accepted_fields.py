"""Fields that clients send out of habit change no answer, and those that would are refused with what to do instead."""

from typing import Any

import httpx
import pytest

from runtime.core.request import MAX_SEED
from runtime.server.protocol.accepted_fields import REFUSED, AcceptedFields
from runtime.server.protocol.chat import ChatRequest
from runtime.server.protocol.generation import CompletionRequest

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
    "verbosity": "low",
    "modalities": ["text"],
}


@pytest.mark.parametrize("path", PATHS)
def test_fields_of_habit_change_no_answer(api: httpx.Client, path: str) -> None:
    assert HABITS.keys() == AcceptedFields.model_fields.keys()
    plain, sent = (api.post(path, json=PATHS[path] | fields) for fields in ({}, HABITS))
    assert sent.status_code == 200, sent.text
    assert sent.json()["choices"] == plain.json()["choices"]


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


def test_a_template_without_reasoning_effort_refuses_it(demo_server: tuple[str, Any, Any]) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 1, "reasoning_effort": "low"}
    response = httpx.post(f"{demo_server[0]}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert "'reasoning_effort'" in response.json()["error"]["message"]

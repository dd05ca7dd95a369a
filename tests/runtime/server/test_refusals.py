"""Everything a server must not accept, as OpenAI's error JSON with the field's name."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai_schema import validate

from runtime.server.errors import describe_invalid

JSON = {"Content-Type": "application/json"}
COMPLETION = {"model": "alphabet", "prompt": "Z"}
CHAT = {"model": "alphabet", "messages": [{"role": "user", "content": "Hi"}]}


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, which is as OpenAI publishes it."""
    assert response.status_code == status, response.text
    validate(response.json(), "ErrorResponse")
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


@pytest.mark.parametrize("name", ["best_of", "suffix", "functions", "audio", "max_tokenz"])
@pytest.mark.parametrize("value", [False, 1, ""])
def test_unknown_fields_are_named(api: httpx.Client, name: str, value: Any) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = refusal(api.post(path, json={**body, name: value}), 400)
        assert error["param"] == name
        assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**31),  # beyond int64 it would have failed the step, and all requests in it
        ("min_p", 1.5),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", 5),
        ("stream", "yes"),
        ("n", 0),
        ("n", 129),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("logit_bias", []),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"7": 101}),
        ("logit_bias", {"7": "1"}),
        ("logit_bias", {"7": True}),
        ("stop_token_ids", 3),
        ("stop_token_ids", [1] * 129),
        ("priority", 101),
        ("priority", 0.5),
        ("cache_salt", 7),
        ("cache_salt", "x" * 257),
        ("logprobs", 21),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", [1]]),
        ("prompt", [1, True]),
        ("prompt", None),
        ("model", 3),
    ],
)
def test_wrong_values_are_named(api: httpx.Client, name: str, value: Any) -> None:
    error = refusal(api.post("/v1/completions", json={**COMPLETION, name: value}), 400)
    assert error["param"] == name
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": 7}], "messages[0].name"),
        ([{"role": "user", "content": "x", "audio": {}}], "messages[0].audio"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
    ],
)
def test_wrong_messages_are_named(api: httpx.Client, messages: Any, param: str) -> None:
    error = refusal(api.post("/v1/chat/completions", json={**CHAT, "messages": messages}), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "messages cannot be set here"),
        ("chat/completions", {"chat_template_kwargs": {"self": 1}}, "self cannot be set here"),
        ("chat/completions", {"max_tokens": 2, "max_completion_tokens": 3}, "disagree"),
    ],
)
def test_contradictions_are_explained(api: httpx.Client, path: str, fields: dict[str, Any], words: str) -> None:
    body = COMPLETION if path == "completions" else CHAT
    assert re.search(words, refusal(api.post(f"/v1/{path}", json={**body, **fields}), 400)["message"])


def test_missing_field(api: httpx.Client) -> None:
    error = refusal(api.post("/v1/completions", json={"model": "alphabet"}), 400)
    assert (error["param"], error["code"]) == ("prompt", "missing_field")


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 5000, b"1" * 5000])
def test_bodies_that_are_no_object(api: httpx.Client, body: bytes) -> None:
    refusal(api.post("/v1/completions", content=body, headers=JSON), 400)


def test_json_error_says_where(api: httpx.Client) -> None:
    message = refusal(api.post("/v1/completions", content=b'{"model": }', headers=JSON), 400)["message"]
    assert "JSON" in message
    assert "character 10" in message


@pytest.mark.parametrize("body", [{**COMPLETION, "\ud800": 1}, {**COMPLETION, "n\ud800": 2}])
def test_field_names_that_are_no_unicode(api: httpx.Client, body: dict[str, Any]) -> None:
    response = api.post("/v1/completions", content=json.dumps(body), headers=JSON)
    assert refusal(response, 400)["code"] == "unknown_field"


def test_nan_is_no_number(api: httpx.Client) -> None:
    body = b'{"model": "alphabet", "prompt": "Z", "temperature": NaN}'
    response = api.post("/v1/completions", content=body, headers=JSON)
    assert refusal(response, 400)["param"] == "temperature"


def test_body_of_another_type(api: httpx.Client) -> None:
    response = api.post("/v1/completions", content=b'{"model": "alphabet"}', headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in refusal(response, 400)["message"]


def test_prompt_longer_than_the_context(api: httpx.Client) -> None:
    error = refusal(api.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 100}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count("100 tokens") == 2


def test_prompt_and_output_longer_than_the_context(api: httpx.Client) -> None:
    error = refusal(api.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 90, "max_tokens": 11}), 400)
    assert "at most 10 tokens" in error["message"]


def test_empty_prompt(api: httpx.Client) -> None:
    assert refusal(api.post("/v1/completions", json={**COMPLETION, "prompt": ""}), 400)["code"] == "empty_prompt"


def test_unknown_model_and_path(api: httpx.Client) -> None:
    error = refusal(api.post("/v1/completions", json={**COMPLETION, "model": "gpt-4"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'alphabet'" in error["message"]
    refusal(api.get("/v1/models/gpt-4"), 404)
    refusal(api.get("/v2/completions"), 404)
    refusal(api.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "open sesame"},
        {"Authorization": b"Bearer \xff"},
        {"Authorization": "Basic open sesame"},
    ],
)
def test_missing_or_wrong_api_key(guarded_api: httpx.Client, headers: dict[str, Any]) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
        refused = guarded_api.get(path, headers=headers)
        assert refusal(refused, 401)["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    refusal(guarded_api.post("/v1/completions", json=COMPLETION, headers=headers), 401)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_right_api_key(guarded_api: httpx.Client, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} open sesame"}
    assert guarded_api.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200


def test_health_needs_no_api_key(guarded_api: httpx.Client) -> None:
    assert guarded_api.get("/health").status_code == 200


def test_body_over_the_limit(api: httpx.Client) -> None:
    refusal(api.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 10_000}), 413)


def test_body_over_the_limit_without_a_length(api: httpx.Client) -> None:
    chunks = (b"x" * 1000 for _ in range(20))
    response = api.post("/v1/completions", content=chunks, headers=JSON)
    assert refusal(response, 413)["code"] == "body_too_large"


def test_full_queue(api: httpx.Client, engine: Any, wait_until: Any) -> None:
    engine.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        hanging = [pool.submit(api.post, "/v1/completions", json=COMPLETION) for _ in range(4)]
        wait_until(lambda: len(engine.active) == 4)
        refused = api.post("/v1/completions", json=COMPLETION)
        assert refusal(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        engine.gate.set()
        assert [future.result().status_code for future in hanging] == [200] * 4
    assert api.post("/v1/completions", json=COMPLETION).status_code == 200


def test_more_prompts_than_the_queue_ever_takes(api: httpx.Client) -> None:
    assert "at most 4" in refusal(api.post("/v1/completions", json={**COMPLETION, "prompt": ["a"] * 5}), 400)["message"]


@pytest.mark.parametrize("kind", ["value_error", "contradiction"])
@pytest.mark.parametrize("end", ["", "."])
def test_what_is_wrong_with_a_whole_body_begins_with_no_empty_name(kind: str, end: str) -> None:
    found = describe_invalid([{"type": kind, "loc": (), "msg": f"Value error, a excludes b{end}"}], {})
    assert found == ("a excludes b.", None, "contradiction")

"""Answers with a form, over HTTP from the demo model: every way to ask for one, and every way to ask wrongly."""

import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from covering import covering
from jsonschema import validate
from pydantic import BaseModel, Field
from servers import answer, streamed

from runtime.text.grammar import MAX_WORK

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "Where to?"}]
COMPLETION = {"model": "demo", "prompt": "Where to?", "max_tokens": 100, "seed": 3}
CHAT = {"model": "demo", "messages": MESSAGES, "max_tokens": 100, "seed": 3}
CHOICES = ["yes", 'no "really"', "\\é\n☃"]


@pytest.fixture
def api(demo_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_server[0], timeout=60) as client:
        yield client


@pytest.fixture
def client(demo_server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server[0]}/v1", api_key="none", max_retries=0)


def texts(api: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    """Texts of all choices, asked for in one piece and as a stream: they must be equal."""
    choices = answer(api, f"/v1/{path}", **body)["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    whole = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    joined = [""] * len(choices)
    for chunk in streamed(api, f"/v1/{path}", **body):
        choice = chunk["choices"][0]
        joined[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert joined == whole
    return whole


def test_response_format_of_a_schema(api: httpx.Client) -> None:
    for text in texts(api, "chat/completions", {**CHAT, "response_format": RESPONSE_FORMAT, "n": 3}):
        validate(json.loads(text), SCHEMA)


def test_response_format_of_any_object_and_of_text(api: httpx.Client) -> None:
    body = {**CHAT, "response_format": {"type": "json_object"}, "temperature": 0}
    assert isinstance(json.loads(texts(api, "chat/completions", body)[0]), dict)
    plain = {"path": "/v1/chat/completions", **CHAT, "max_tokens": 5}
    assert answer(api, **plain, response_format={"type": "text"})["choices"] == answer(api, **plain)["choices"]


FORMS = [
    ({"guided_json": SCHEMA}, r"\{[\s\S]*\}"),
    ({"guided_json": json.dumps(SCHEMA)}, r"\{[\s\S]*\}"),
    ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
    ({"guided_choice": CHOICES}, "|".join(map(re.escape, CHOICES))),
    ({"guided_grammar": 'start: "(" inner ")"\ninner: /[xy]/ | "z"'}, r"\([xyz]\)"),
    ({"structured_outputs": {"json": SCHEMA}}, r"\{[\s\S]*\}"),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
    ({"structured_outputs": {"grammar": 'start: "ok"'}}, "ok"),
]


@pytest.mark.parametrize(("path", "form"), covering(["completions", "chat/completions"], FORMS))
def test_every_name_of_a_form(api: httpx.Client, path: str, form: tuple[dict[str, Any], str]) -> None:
    fields, pattern = form
    body = COMPLETION if path == "completions" else CHAT
    for text in texts(api, path, {**body, **fields, "n": 2}):
        assert re.fullmatch(pattern, text), text
        if "{" in text:
            validate(json.loads(text), SCHEMA)


def test_stop_strings_and_limits_cut_forms_too(api: httpx.Client) -> None:
    body = {"path": "/v1/completions", **COMPLETION, "guided_regex": "[ab]{30}c"}
    (choice,) = answer(api, **body, stop="b", temperature=2)["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(choice["text"]) <= {"a"}
    (choice,) = answer(api, **body | {"max_tokens": 2})["choices"]
    assert choice["finish_reason"] == "length"


def test_the_client_parses_models(client: openai.OpenAI) -> None:
    class Trip(BaseModel):
        days: int = Field(ge=0, le=20)
        is_sunny: bool

    answer = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Trip, seed=1)  # type: ignore[arg-type]
    assert isinstance(answer.choices[0].message.parsed, Trip)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_grammar": "start: nothing"}, "unknown name"),
        ({"guided_json": {"items": {"$dynamicRef": "#a"}}}, "dynamicRef"),
        ({"guided_json": "{"}, "line 1 column 2"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["\ud800"]}, "surrogates"),
        ({"guided_regex": "a", "guided_json": {}}, r"guided_json.*guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, r"guided_regex and structured_outputs\.regex"),
        ({"structured_outputs": {"regexp": "a"}}, r"structured_outputs\.regexp"),
        ({"response_format": RESPONSE_FORMAT, "guided_regex": "a"}, r"guided_regex.*response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, r"response_format\.type"),
        ({"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "allows no text"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_forms_are_refused_before_anything_is_computed(
    demo_server: Any, api: httpx.Client, fields: dict[str, Any], words: str, stream: bool
) -> None:
    steps = demo_server[1].metrics.steps_total
    body = json.dumps({**CHAT, **fields, "stream": stream})
    response = api.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert re.search(words, response.json()["error"]["message"])
    assert demo_server[1].metrics.steps_total == steps


def test_compiling_does_not_hold_up_other_requests(
    api: httpx.Client, demo_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop and its threads answer while schemas are compiled, held here until others have their answers."""
    url, engine, _ = demo_server
    compiling, answered = threading.Event(), threading.Event()
    check_request = engine.check_request

    def held(*arguments: Any) -> None:
        compiling.set()
        assert answered.wait(60)
        check_request(*arguments)

    monkeypatch.setattr(engine, "check_request", held)
    count = min(32, (os.cpu_count() or 1) + 4)  # threads of the event loop
    unknown = [{**SCHEMA, "title": f"Not compiled yet {number}"} for number in range(count)]
    with ThreadPoolExecutor(count) as pool, httpx.Client(base_url=url, timeout=30) as other:
        bodies = [{**COMPLETION, "guided_json": schema, "max_tokens": 1} for schema in unknown]
        slow = [pool.submit(api.post, "/v1/completions", json=body) for body in bodies]
        try:
            assert compiling.wait(60)
            assert other.get("/health").status_code == 200
            assert other.post("/tokenize", json={"model": "demo", "prompt": "hello"}).status_code == 200
            assert not any(request.done() for request in slow)
        finally:
            answered.set()
    assert {request.result().status_code for request in slow} == {200}


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_gets_too_complex_on_the_way_is_no_failure_of_the_server(
    api: httpx.Client, stream: bool
) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(2700)}}
    response = api.post("/v1/completions", json={**COMPLETION, "guided_json": schema, "stream": stream})
    assert response.status_code == 400
    assert "too complex" in response.json()["error"]["message"]


@pytest.mark.parametrize("count", [1, 8])
def test_an_ambiguous_grammar_delays_no_other_request_of_its_client(api: httpx.Client, count: int) -> None:
    ambiguous = {"guided_grammar": 'start: a\na: a a | "x"', "ignore_eos": True, "max_tokens": 1500, "n": count}
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(api.post, "/v1/completions", json={**COMPLETION, **ambiguous}, timeout=60)
        others = [api.post("/v1/completions", json={**COMPLETION, "max_tokens": 4}) for _ in range(4)]
    assert {other.status_code for other in others} == {200}
    assert max(other.elapsed.total_seconds() for other in others) < 5
    assert (refused.result().status_code, refused.result().json()["error"]["code"]) == (400, "refused")
    assert f"{MAX_WORK.seconds:g} s" in refused.result().json()["error"]["message"]
    assert refused.result().elapsed.total_seconds() < 45  # of a limit in processor time, on a machine with other work

"""Bodies are refused by length and number before they are read, and long ones are prepared in another process."""

import asyncio
import json
import os
import signal
import threading
from array import array
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import answer
from starlette.requests import Request

from compress.common.errors import RequestError
from runtime.server.errors import ApiError
from runtime.server.intake import LONG_BYTES, SHORT_BYTES, SLOW_FIELDS, Intake, Prepare, ServedText, outcome_of
from runtime.server.protocol.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from runtime.server.protocol.generation import MAX_CHOICES, MAX_INPUTS
from runtime.server.routes.chat import prepare_chat
from runtime.server.routes.completions import prepare_completion
from runtime.server.routes.embeddings import prepare_inputs
from runtime.server.routes.tokenize import answer_tokenize

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 1}
DEEP_BYTES = 9_000  # bytes that the server takes, and more levels than Python's stack has
ELSE = object()  # no number, text, list or object: whoever looks at it fails


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [500, 2000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("field", ["prompt", "input", "messages", "guided_json", "chat_template_kwargs", "other"])
def test_deep_bodies_do_no_harm(api: httpx.Client, path: str, field: str, depth: int, opening: str) -> None:
    depth //= len(opening)
    closing = opening.replace('"a":', "")[::-1].translate(str.maketrans("[{", "]}"))
    nested = opening * depth + "1" + closing * depth
    content = f'{json.dumps(COMPLETION)[:-1]}, "{field}": {nested}}}'
    response = api.post(path, content=content, headers={"Content-Type": "application/json"})
    may_be_served = field == "guided_json" and path == "/v1/completions"  # the engine looks at it, which is none here
    assert response.status_code in ((200, 400) if may_be_served else (400,)), response.text


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_bodies_too_deep_for_a_parser_are_refused(api: httpx.Client, opening: str) -> None:
    body = opening * (DEEP_BYTES // len(opening))
    response = api.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "nested_too_deeply")


CONTEXT = "the context"
PLACES = "places in the queue"


@pytest.mark.parametrize(
    ("prepare", "limit", "field", "item"),
    [
        (prepare_completion, CONTEXT, "prompt", ELSE),
        (prepare_completion, PLACES, "prompt", ""),
        (prepare_completion, MAX_CHOICES, "guided_choice", ELSE),
        (prepare_inputs, CONTEXT, "input", ELSE),
        (prepare_inputs, MAX_INPUTS, "input", ""),
        (prepare_inputs, MAX_INPUTS, "input", [ELSE]),
        (prepare_chat, MAX_MESSAGES, "messages", ELSE),
        (prepare_chat, MAX_TOOLS, "tools", ELSE),
        (answer_tokenize, MAX_MESSAGES, "messages", ELSE),
    ],
)
def test_what_is_too_many_is_refused_by_its_number(
    served: ServedText, monkeypatch: Any, prepare: Prepare[Any], limit: Any, field: str, item: Any
) -> None:
    known = {CONTEXT: served.limits.max_model_len, PLACES: served.limits.max_requests}
    limit = known.get(limit, limit)
    body = {"model": "alphabet", field: [item] * (limit + 1)}
    monkeypatch.setattr(json, "loads", lambda raw: body)
    with pytest.raises(ApiError) as refusal:
        prepare(served, b"")
    assert (refusal.value.status_code, refusal.value.param) == (400, field)
    assert {limit, limit + 1} <= numbers_in(refusal.value.detail)


def test_parts_of_a_message_are_counted(served: ServedText, monkeypatch: Any) -> None:
    messages = [{"role": "user", "content": [ELSE] * (MAX_PARTS + 1)}]
    monkeypatch.setattr(json, "loads", lambda raw: {"model": "alphabet", "messages": messages})
    with pytest.raises(ApiError) as refusal:
        prepare_chat(served, b"")
    assert (refusal.value.status_code, refusal.value.param) == (400, "messages[0].content")
    assert {MAX_PARTS, MAX_PARTS + 1} <= numbers_in(refusal.value.detail)


def numbers_in(text: str) -> set[int]:
    return {int(word) for word in text.replace(".", " ").split() if word.isdigit()}


def test_as_many_as_allowed_are_served(served: ServedText) -> None:
    found = prepare_inputs(served, json.dumps({"model": "alphabet", "input": ["ab"] * MAX_INPUTS}).encode())
    assert found.inputs == [array("i", [*b"ab"])] * MAX_INPUTS
    prompts = [[7] * (served.limits.max_model_len - 1)] * served.limits.max_requests
    body = prepare_completion(served, json.dumps({**COMPLETION, "prompt": prompts}).encode())
    assert [list(prompt) for prompt in body.prompts] == prompts


def test_errors_are_the_same_from_another_process(served: ServedText) -> None:
    refusal = outcome_of(prepare_completion, served, b'{"model": "other", "prompt": "a"}')
    assert isinstance(refusal, ApiError)
    copied = refusal.__reduce__()
    assert vars(copied[0](*copied[1])) == vars(refusal)
    assert isinstance(outcome_of(raise_request_error, served, b""), RequestError)
    assert isinstance(outcome_of(raise_bug, served, b""), RuntimeError)


@pytest.mark.parametrize(
    ("body", "is_at_once"),
    [(b"{}", True), (b" " * SHORT_BYTES, False), (b"{" + SLOW_FIELDS + b'multiplier": 1}', False)],
    ids=["short", "longer", "a search"],
)
def test_short_bodies_need_no_thread_unless_they_search_the_vocabulary(
    served: ServedText, body: bytes, is_at_once: bool
) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    found = asyncio.run(Intake(served).read(Request(scope, receive), thread_of))
    assert (found == threading.get_ident()) is is_at_once


def thread_of(served: ServedText, raw: bytes) -> int:
    return threading.get_ident()


def raise_request_error(served: ServedText, raw: bytes) -> None:
    raise RequestError("problem", "remedy")


def raise_bug(served: ServedText, raw: bytes) -> None:
    raise LookupError


@pytest.fixture
def demo(demo_server: tuple[str, Any, Any]) -> Any:
    with httpx.Client(base_url=demo_server[0], timeout=60) as client:
        yield client


def test_long_bodies_are_answered_like_short_ones(demo: httpx.Client, demo_server: tuple[str, Any, Any]) -> None:
    text = "The castle was built in the year 1943. \u00e4\u4e16\n" * (LONG_BYTES // 40)
    tokens = demo_server[2].encode(text)
    found = answer(demo, "/tokenize", prompt=text, return_token_strs=True)
    assert found["tokens"] == tokens
    assert found["count"] == len(found["token_strs"]) == len(tokens)
    assert answer(demo, "/detokenize", tokens=tokens) == {"prompt": text}
    for body, status, code in (
        ({"prompt": text}, 400, "context_length_exceeded"),
        ({"prompt": "a", "user": text, "model": "other"}, 404, "model_not_found"),
        ({"prompt": "a", "user": text, "top_p": 7}, 400, "invalid_value"),
    ):
        response = demo.post("/v1/completions", json={"model": "demo", **body})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    short = {"model": "demo", "prompt": "The castle", "max_tokens": 8, "temperature": 0, "logit_bias": {"5": -100}}
    first, second = (answer(demo, "/v1/completions", **short, user=user)["choices"] for user in ("a", text))
    assert first == second


@pytest.mark.full
def test_a_killed_process_is_replaced(demo: httpx.Client) -> None:
    text = "a b " * LONG_BYTES
    answer(demo, "/tokenize", prompt=text)
    for worker in workers():
        os.kill(worker, signal.SIGKILL)
    response = demo.post("/tokenize", json={"prompt": text})
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert answer(demo, "/tokenize", prompt=text)["count"] > 0


def workers() -> list[int]:
    """Processes that prepare bodies for servers of this one."""
    children = [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    return [pid for pid in children if b"intake" in Path(f"/proc/{pid}/cmdline").read_bytes()]

"""No body makes the server fail: what it does not understand is the client's error, in the error's usual shape."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.server.protocol import CompletionRequest
from runtime.server.protocol_chat import ChatRequest

EXAMPLES = 100
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": JSON_VALUES | st.text()},
        optional={"name": JSON_VALUES},
    ),
    max_size=3,
)


def bodies(model: type, **likely: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the API's own fields, some of their values likely, the others anything."""
    fields = {name: likely.get(name, st.nothing()) | JSON_VALUES for name in model.model_fields}
    return st.fixed_dictionaries({}, optional={**fields, "model": st.just("alphabet"), "other": JSON_VALUES})


COMPLETIONS = bodies(
    CompletionRequest,
    prompt=st.text(max_size=40)
    | st.lists(st.text(max_size=4), max_size=6)
    | st.lists(st.integers(0, 255), max_size=40),
    max_tokens=st.integers(-1, 120),
    stop=st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=20),
    logprobs=st.integers(-1, 22),
    stream=st.booleans(),
    echo=st.booleans(),
    temperature=st.floats(-1, 3),
    stream_options=st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
)
CHATS = bodies(
    ChatRequest,
    messages=MESSAGES,
    max_tokens=st.integers(-1, 120),
    logprobs=st.booleans(),
    top_logprobs=st.integers(-1, 22),
    stream=st.booleans(),
)


@pytest.fixture(scope="module")
def fuzzed(alphabet_url: str) -> Any:
    with httpx.Client(base_url=alphabet_url, timeout=20) as client:
        yield client


def check(client: httpx.Client, path: str, content: bytes | str) -> None:
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error":' not in response.text


@given(body=COMPLETIONS)
@examples(EXAMPLES)
def test_completions(fuzzed: httpx.Client, shared_engine: Any, body: dict[str, Any]) -> None:
    check(fuzzed, "/v1/completions", json.dumps(body))
    assert not shared_engine.active


@given(body=CHATS)
@examples(EXAMPLES)
def test_chats(fuzzed: httpx.Client, shared_engine: Any, body: dict[str, Any]) -> None:
    check(fuzzed, "/v1/chat/completions", json.dumps(body))
    assert not shared_engine.active


@given(body=st.binary(max_size=60) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
@examples(EXAMPLES)
def test_anything(fuzzed: httpx.Client, body: bytes) -> None:
    check(fuzzed, "/v1/completions", body)
    check(fuzzed, "/v1/chat/completions", body)

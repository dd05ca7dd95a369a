"""No body makes the server fail, random or as its own description says; every answer is one that is declared."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from servable_bodies import brief, of_one_kind, servable
from servers import is_idle, serving_demo
from tiers import examples

from runtime.server.protocol.chat import ChatRequest
from runtime.server.protocol.generation import CompletionRequest

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


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
# What a JSON schema cannot say: prompts that are too long for the context, token ids beyond the vocabulary, more
# answers than the queue has places, fields that contradict each other.
BEYOND_A_SCHEMA = {"context_length_exceeded", "empty_prompt", "too_many_answers", "contradiction", "refused"}
GENERATIONS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
VOCABULARY = 256  # ids that every tokenizer has
BOUNDED = settings(deadline=None, max_examples=3, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(BOUNDED, max_examples=300, derandomize=False)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Any]]:
    with serving_demo(8, dtype="float32", max_model_len=192, num_blocks=128) as (url, engine, _):
        yield url, engine


def operations(url: str) -> list[APIOperation]:
    """Everything the server says it can do."""
    return [found.ok() for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(served: tuple[str, Any], wait_until: Any) -> Iterator[None]:
    yield
    wait_until(lambda: is_idle(served[1]))


def check_fitting(case: Case) -> int:
    """As it is, a request may ask for what no schema can rule out; made servable, it must be served."""
    response = case.call(timeout=60)
    case.validate_response(response, checks=CHECKS)
    if response.status_code == 400:
        assert response.json()["error"]["code"] in BEYOND_A_SCHEMA, response.text
    else:
        assert response.status_code in (200, 404), response.text
    if not isinstance(case.body, dict):
        return response.status_code
    case.body = servable(case.body, VOCABULARY)
    if case.path in GENERATIONS:
        case.body = brief(case.body)
    elif case.path == "/tokenize":
        case.body = of_one_kind(case.body)
    served = case.call(timeout=60)
    case.validate_response(served, checks=CHECKS)
    assert served.status_code == 200, served.text
    return response.status_code


def check_unfitting(case: Case) -> int:
    response = case.call(timeout=60)
    too_long = response.status_code == 413  # which is found before anything else, and is unknown to the check
    case.validate_response(response, checks=CHECKS if too_long else [*CHECKS, negative_data_rejection])
    return response.status_code


def statuses(operation: APIOperation, mode: GenerationMode, bounds: settings) -> Counter[int]:
    """Sends many requests to one operation and checks every answer; how often each status came."""
    check = check_fitting if mode is GenerationMode.POSITIVE else check_unfitting
    seen: Counter[int] = Counter()

    @bounds
    @given(case=operation.as_strategy(generation_mode=mode))
    def every(case: Case) -> None:
        seen[check(case)] += 1

    every()
    return seen


def fuzz(url: str, mode: GenerationMode, bounds: settings) -> None:
    for operation in operations(url):
        try:
            seen = statuses(operation, mode, bounds)
        except Unsatisfiable:  # what takes no input cannot be given a wrong one
            assert mode is GenerationMode.NEGATIVE, operation.label
            assert not operation.body, operation.label
        else:
            print(f"{mode.value} {operation.label}: {dict(seen)}")


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_operation(served: tuple[str, Any], mode: GenerationMode) -> None:
    fuzz(served[0], mode, BOUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_operation_at_length(served: tuple[str, Any], mode: GenerationMode) -> None:
    fuzz(served[0], mode, LONG)

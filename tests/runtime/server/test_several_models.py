"""Several models at one address: who answers, by name, by rule, and by the confidence of a small model."""

import math
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from alphabet import AlphabetEngine, ByteTokenizer
from servers import answer, events, serving, streamed

from runtime.core.config import Limits
from runtime.core.request import Delta, RequestOptions, SamplingParams, TokenLogprobs
from runtime.engine.engine_client import Health
from runtime.routing.routes import Cascade, Route, Rule
from runtime.server.app import ServedModel, create_app

LIMITS = Limits(max_model_len=100, max_requests=4)
CASCADE = Cascade("small", "large", -1.0, tokens=4)
ROUTES = {
    "auto": Route((Rule(model="large", tools=True), Rule(model="large", prompt_at_least=40)), CASCADE),
    "rules": Route((Rule(model="large", text=re.compile("(?i)hard")), Rule(model="large", json=True)), "small"),
    "whole": Route((), Cascade("small", "large", -1.0, tokens=0)),
}


class DoubtfulEngine(AlphabetEngine):
    """Is sure of a token unless it is a letter after `m`."""

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None = None, **options: RequestOptions
    ) -> AsyncGenerator[list[Delta], None]:
        async for deltas in super().generate(prompt, sampling, request_id, **options):
            for delta in deltas:
                if delta.logprobs:
                    delta.logprobs = [TokenLogprobs(-0.1 if token <= ord("m") else -9.0) for token in delta.token_ids]
            yield deltas


class LoudEngine(AlphabetEngine):
    """Answers in upper case."""

    def letter(self, *arguments: Any) -> Delta:
        delta = super().letter(*arguments)
        delta.text = delta.text.upper()
        return delta


@contextmanager
def served() -> Iterator[tuple[httpx.Client, AlphabetEngine, AlphabetEngine]]:
    small, large = DoubtfulEngine(), LoudEngine()
    other = ServedModel(large, ByteTokenizer(), "large", LIMITS, {"loud": Path("loud")})
    own = {"soft": Path("soft")}
    app = create_app(small, ByteTokenizer(), "small", LIMITS, others=[other], routes=ROUTES, adapters=own)
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as api:
        yield api, small, large


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[httpx.Client, AlphabetEngine, AlphabetEngine]]:
    with served() as found:
        yield found


@pytest.fixture
def several(server: tuple[httpx.Client, AlphabetEngine, AlphabetEngine]) -> Iterator[httpx.Client]:
    yield server[0]
    for engine in server[1:]:
        engine.reset()


def ask(api: httpx.Client, model: str, prompt: str, **body: Any) -> tuple[str, str]:
    """The model that answered, and its text; whole and streamed are the same."""
    body = {"model": model, "prompt": prompt, "max_tokens": 6} | body
    found = answer(api, "/v1/completions", **body)
    chunks = streamed(api, "/v1/completions", **body)
    text = found["choices"][0]["text"]
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert {chunk["model"] for chunk in chunks} == {found["model"]}
    return found["model"], text


def test_the_name_chooses(several: httpx.Client) -> None:
    assert ask(several, "small", "Z") == ("small", "nopqrs")
    assert ask(several, "large", "Z") == ("large", "NOPQRS")


def test_an_adapter_goes_to_its_model(
    several: httpx.Client, server: tuple[httpx.Client, AlphabetEngine, AlphabetEngine]
) -> None:
    _, small, large = server
    assert ask(several, "soft", "Z") == ("soft", "nopqrs")
    assert ask(several, "loud", "Z") == ("loud", "NOPQRS")
    assert {options.adapter for options in small.options} == {"soft"}
    assert {options.adapter for options in large.options} == {"loud"}
    embedded = answer(several, "/v1/embeddings", model="loud", input="x")
    assert embedded["model"] == "loud"


def test_all_models_are_listed(several: httpx.Client) -> None:
    listed = several.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["small", "large", "soft", "loud", "auto", "rules", "whole"]
    assert [model["parent"] for model in listed[:4]] == [None, None, "small", "large"]
    for model in listed:
        assert several.get(f"/v1/models/{model['id']}").json() == model
    names = several.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]["model"]
    assert all(name in str(names) for name in ("large", "loud", "auto"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/medium"])
def test_an_unknown_name_is_answered_with_all(several: httpx.Client, path: str) -> None:
    body = {"model": "medium", "prompt": "x"}
    response = several.get(path) if "models" in path else several.post(path, json=body)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "'small' or 'large' or 'auto'" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": 3, "prompt": "x"}', b'{"prompt": "x"}'])
def test_invalid_bodies_are_refused_as_by_one_model(several: httpx.Client, body: bytes) -> None:
    response = several.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_rules_choose(several: httpx.Client) -> None:
    assert ask(several, "rules", "simple")[0] == "small"
    assert ask(several, "rules", "a HARD one")[0] == "large"
    assert ask(several, "auto", "b" * 40) == ("large", "VWXYZA")
    assert ask(several, "auto", [*b"b" * 40])[0] == "large"
    talk = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hard"}]}], "max_tokens": 2}
    assert answer(several, "/v1/chat/completions", model="rules", **talk)["model"] == "large"
    assert answer(several, "/v1/responses", model="rules", input="hard")["model"] == "large"
    assert answer(several, "/v1/messages", model="rules", **talk)["model"] == "large"


@pytest.mark.parametrize("field", ["response_format", "guided_json"])
def test_a_rule_for_json(several: httpx.Client, field: str) -> None:
    talk = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": "rules"}
    assert answer(several, "/v1/chat/completions", **talk, **{field: {"type": "json_object"}})["model"] == "large"
    assert answer(several, "/v1/chat/completions", **talk, response_format={"type": "text"})["model"] == "small"


def confident(prompt: str, tokens: int) -> bool:
    """Whether the small model keeps its first tokens: all letters up to `m`, or few others."""
    letters = [ord("a") + (ord(prompt[-1]) + 1 + i) % 26 for i in range(tokens)]
    return sum(-0.1 if letter <= ord("m") else -9.0 for letter in letters) / tokens >= -1.0


@pytest.mark.parametrize("prompt", [*"ABCDMNOPQRST"])
@pytest.mark.parametrize(("route", "tokens"), [("auto", 4), ("whole", 6)])
def test_the_large_model_takes_over_where_the_small_one_is_unsure(
    several: httpx.Client, prompt: str, route: str, tokens: int
) -> None:
    model = "small" if confident(prompt, tokens) else "large"
    assert ask(several, route, prompt) == ask(several, model, prompt)


def test_confidence_is_neither_returned_nor_paid_for_unasked(
    several: httpx.Client, server: tuple[httpx.Client, AlphabetEngine, AlphabetEngine]
) -> None:
    _, small, large = server
    sure = next(prompt for prompt in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if confident(prompt, 6))
    body = {"model": "auto", "prompt": sure, "max_tokens": 6}
    found = answer(several, "/v1/completions", **body)
    assert found["choices"][0]["logprobs"] is None
    assert found["usage"]["completion_tokens"] == 6
    assert (len(small.seen), len(large.seen)) == (1, 0)
    scores = answer(several, "/v1/completions", **body, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"]
    assert all(math.isclose(score, -0.1) for score in scores)


def test_the_least_sure_of_several_answers_decides(several: httpx.Client) -> None:
    sure = next(prompt for prompt in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if confident(prompt, 4))
    assert answer(several, "/v1/completions", model="auto", prompt=sure, n=1)["model"] == "small"
    assert answer(several, "/v1/completions", model="auto", prompt=sure, n=2)["model"] == "large"
    body = {"model": "auto", "prompt": sure, "n": 2, "max_tokens": 6}
    assert {chunk["model"] for chunk in streamed(several, "/v1/completions", **body)} == {"large"}


def test_a_request_that_changes_models_leaves_nothing_behind(
    several: httpx.Client, server: tuple[httpx.Client, AlphabetEngine, AlphabetEngine]
) -> None:
    _, small, large = server
    unsure = next(prompt for prompt in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if not confident(prompt, 4))
    for _ in range(LIMITS.max_requests + 1):
        assert ask(several, "auto", unsure)[0] == "large"
    assert not small.active
    assert not large.active


def test_a_failure_before_the_decision_has_its_status(
    several: httpx.Client, server: tuple[httpx.Client, AlphabetEngine, AlphabetEngine]
) -> None:
    server[1].fail_after = 1
    body = {"model": "auto", "prompt": "A", "max_tokens": 6}
    for stream in (False, True):
        response = several.post("/v1/completions", json=body | {"stream": stream})
        assert response.status_code == 500
        assert "logits are not finite" in response.json()["error"]["message"]


def test_a_failure_after_the_decision_ends_the_stream(
    several: httpx.Client, server: tuple[httpx.Client, AlphabetEngine, AlphabetEngine]
) -> None:
    server[1].fail_after = 5
    sure = next(prompt for prompt in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if confident(prompt, 4))
    body = {"model": "auto", "prompt": sure, "max_tokens": 9, "stream": True}
    response = several.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert "error" in events(response.text)[-1]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
def test_virtual_models_only_generate(several: httpx.Client, path: str) -> None:
    named = {"input": "x"} if "embed" in path else {"prompt": "x"}
    assert several.post(path, json={"model": "auto", **named}).status_code == 404
    assert several.post(path, json={"model": "large", **named}).status_code == 200


def test_a_long_body_is_routed_in_the_process_for_long_bodies() -> None:
    with served() as (api, _, _):
        api.headers["x-padding"] = "none"
        assert api.post("/v1/completions", json={"model": "large", "prompt": "b" * 9000}).status_code == 400
        body = {"model": "rules", "prompt": "hard", "max_tokens": 2, "logit_bias": {str(i): 0 for i in range(200)}}
        assert answer(api, "/v1/completions", **body)["model"] == "large"


def test_metrics_count_choices(several: httpx.Client) -> None:
    def count(model: str, reason: str) -> float:
        labels = rf'model_name="{model}",reason="{reason}",route="auto"'
        found = re.search(rf"runtime_routed_requests_total{{{labels}}} (\S+)", several.get("/metrics").text)
        return float(found[1]) if found else 0.0

    before = count("large", "rule"), count("large", "unsure"), count("small", "confident")
    sure = next(prompt for prompt in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if confident(prompt, 4))
    unsure = next(prompt for prompt in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if not confident(prompt, 4))
    for prompt in ("b" * 40, sure, unsure):
        answer(several, "/v1/completions", model="auto", prompt=prompt, max_tokens=4)
    after = count("large", "rule"), count("large", "unsure"), count("small", "confident")
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 1]


def test_health_is_that_of_all(
    several: httpx.Client, server: tuple[httpx.Client, AlphabetEngine, AlphabetEngine]
) -> None:
    assert several.get("/health").status_code == 200
    server[2].failure = "it has stalled"
    found = several.get("/health")
    assert (found.status_code, found.json()["reason"]) == (503, "model large: it has stalled")
    assert server[2].check() == Health(False, "it has stalled", 0, 0, 0.0)

"""A stream, joined, is the whole answer: text, reasons, log-probabilities and usage, for requests drawn at random."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import events, serving_demo

PROMPTS = ["The castle was built in the", "Füße, naïve 東京 🙂", "1, 2, 3,", "Once upon a time\n\n", "x"]
QUICK_CASES = 4
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    with serving_demo(prefill_chunk=8) as (url, *_), httpx.Client(base_url=url, timeout=60) as client:
        yield client


def draw(seed: int) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    rng = random.Random(seed)
    body = {
        "model": "demo",
        "temperature": rng.choice([0, 0.7, 1.3, 2.0]),  # hot answers are full of halves of characters
        "seed": seed,
        "max_tokens": rng.randint(1, 24),
        "n": rng.choice([1, 1, 2, 3]),
        "ignore_eos": rng.random() < 0.5,
        "presence_penalty": rng.choice([0, 0.8]),
    }
    if rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": rng.choice(PROMPTS)}]
        return "/v1/chat/completions", body | rng.choice([{}, {"logprobs": True, "top_logprobs": 2}])
    body["prompt"] = rng.choice([rng.choice(PROMPTS), rng.sample(PROMPTS, 2)])
    return "/v1/completions", body | rng.choice([{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}])


def whole(api: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[Choice], dict[str, int]]:
    response = api.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = parse(response.text)
    choices = [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "reason": choice["finish_reason"],
            "logprobs": lists_of(choice["logprobs"]),
        }
        for choice in answer["choices"]
    ]
    return choices, counts(answer["usage"])


def streamed(api: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[Choice], dict[str, int]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(api.post(path, json={**body, **options}).text, parse)
    joined: dict[int, Choice] = {}
    for chunk in chunks:
        assert chunk["usage"] is None
        (part,) = chunk["choices"]
        own = joined.setdefault(part["index"], {"text": "", "reason": None, "logprobs": {}})
        assert own["reason"] is None, "nothing comes after the end"
        own["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
        own["reason"] = part["finish_reason"]
        for name, values in lists_of(part["logprobs"]).items():
            own["logprobs"].setdefault(name, []).extend(values)
    return [joined[index] for index in sorted(joined)], counts(last["usage"])


def parse(text: str) -> dict[str, Any]:
    """JSON with log-probabilities to 9 digits: whether a prompt was cached changes the last of them."""
    return json.loads(text, parse_float=lambda digits: round(float(digits), 9))


def lists_of(logprobs: dict[str, Any] | None) -> dict[str, list[Any]]:
    return {name: values for name, values in (logprobs or {}).items() if values}


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """Without what the prefix cache knew: the second of two equal requests finds more there."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.parametrize("seeds", [range(QUICK_CASES), pytest.param(range(QUICK_CASES, 250), marks=pytest.mark.slow)])
def test_stream_and_answer(api: httpx.Client, seeds: range) -> None:
    for seed in seeds:
        path, body = draw(seed)
        assert streamed(api, path, body) == whole(api, path, body), body


@pytest.mark.parametrize("seeds", [range(QUICK_CASES), pytest.param(range(QUICK_CASES, 250), marks=pytest.mark.slow)])
def test_stop_strings_wherever_they_fall(api: httpx.Client, seeds: range) -> None:
    """Stop strings cut out of the answer itself: inside tokens, across them, and across what a stream sends at once."""
    cut = 0
    for seed in seeds:
        path, body = draw(seed)
        body = {**body, "n": 1, "max_tokens": 20, "echo": None} if "prompt" in body else {**body, "n": 1}
        text = whole(api, path, body)[0][0]["text"]
        rng = random.Random(seed)
        start = rng.randrange(len(text) + 1)
        stops = [stop for stop in (text[start : start + rng.randint(1, 9)], "never said") if stop]
        found, usage = whole(api, path, {**body, "stop": stops})
        assert streamed(api, path, {**body, "stop": stops}) == (found, usage), (body, stops)
        if len(stops) == 2:
            cut += 1
            assert found[0]["text"] == text[: text.index(stops[0])]
            assert found[0]["reason"] == "stop"
    assert cut > len(seeds) / 2

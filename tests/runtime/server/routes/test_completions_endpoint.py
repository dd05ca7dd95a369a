"""`/v1/completions`, whole and streamed."""

from functools import partial
from typing import Any

import httpx
import pytest
from openai_schema import validate
from servers import answer, streamed

complete = partial(answer, path="/v1/completions", model="alphabet", prompt="Z")


stream = partial(streamed, path="/v1/completions", model="alphabet", prompt="Z")


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_answers_with_text_and_usage(api: httpx.Client) -> None:
    body = complete(api, max_tokens=5)
    assert (body["object"], body["model"]) == ("text_completion", "alphabet")
    assert body["choices"] == [{"index": 0, "text": "nopqr", "logprobs": None, "finish_reason": "length"}]
    counts = {name: body["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")}
    assert counts == {"prompt": 1, "completion": 5, "total": 6}


def test_defaults_are_those_of_openai(api: httpx.Client, engine: Any) -> None:
    complete(api)
    sampling = engine.seen[-1]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.stop) == (0, 0.0, None, ())


def test_null_is_the_default(api: httpx.Client, engine: Any) -> None:
    names = ("max_tokens", "temperature", "top_p", "stop", "seed", "stream", "logprobs", "n", "user", "stream_options")
    complete(api, **dict.fromkeys(names))
    assert engine.seen[-1].max_tokens == 16


def test_every_sampling_field_reaches_the_engine(api: httpx.Client, engine: Any) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "ignore_eos": True, "logprobs": 1}
    complete(api, max_tokens=3, stop=["x", "yz"], **fields)
    sampling = engine.seen[-1]
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.stop == ("x", "yz")
    assert sampling.max_tokens == 3


def test_default_max_tokens_shrinks_to_the_context(api: httpx.Client) -> None:
    assert complete(api, prompt="x" * 95)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "texts"), [("A", ["op"]), (["A", "B"], ["op", "pq"]), ([65], ["op"]), ([[65], [66]], ["op", "pq"])]
)
def test_all_kinds_of_prompt(api: httpx.Client, prompt: Any, texts: list[str]) -> None:
    body = complete(api, prompt=prompt, max_tokens=2)
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["completion_tokens"] == 2 * len(texts)


def test_stream_joined_is_the_whole_answer(api: httpx.Client) -> None:
    whole = complete(api, prompt=["A", "B"], max_tokens=7)
    chunks = stream(api, prompt=["A", "B"], max_tokens=7)
    for choice in whole["choices"]:
        assert text_of(chunks, choice["index"]) == choice["text"]


def test_stream_has_one_empty_finish_chunk_at_its_end(api: httpx.Client) -> None:
    chunks = stream(api, max_tokens=3)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "length"]
    assert chunks[-1]["choices"][0]["text"] == ""
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


def test_usage_chunk_when_asked_for(api: httpx.Client) -> None:
    *chunks, last = stream(api, max_tokens=3, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 4


def test_echo_puts_the_prompt_first(api: httpx.Client) -> None:
    assert complete(api, prompt=[[65], [66]], max_tokens=2, echo=True)["choices"][1]["text"] == "Bpq"
    assert text_of(stream(api, prompt="A", max_tokens=2, echo=True)) == "Aop"


def test_several_answers_per_prompt(api: httpx.Client) -> None:
    body = complete(api, prompt=["A", "B"], n=2, max_tokens=2, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["Aop", "Ayz", "Bpq", "Bza"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 8)
    chunks = stream(api, prompt=["A", "B"], n=2, max_tokens=2, echo=True)
    assert [text_of(chunks, index) for index in range(4)] == ["Aop", "Ayz", "Bpq", "Bza"]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons.count("length") == 4


def test_logprobs_are_aligned_and_finite(api: httpx.Client) -> None:
    logprobs = complete(api, max_tokens=2, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["n", "o"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["top_logprobs"] == [{"n": -0.5, "\x01": -9999.0}, {"o": -0.5, "\x01": -9999.0}]


def test_streamed_logprobs_equal_the_whole(api: httpx.Client) -> None:
    whole = complete(api, max_tokens=4, logprobs=1)["choices"][0]["logprobs"]
    pieces = [c["choices"][0]["logprobs"] for c in stream(api, max_tokens=4, logprobs=1)]
    for name, values in whole.items():
        assert [value for piece in pieces if piece for value in piece[name]] == values


def test_engine_failure_is_a_500_with_its_reason(api: httpx.Client, engine: Any) -> None:
    engine.fail_after = 0
    for stream in (False, True):
        response = api.post("/v1/completions", json={"model": "alphabet", "prompt": "Z", "stream": stream})
        assert response.status_code == 500
        assert "logits are not finite" in response.json()["error"]["message"]
        validate(response.json(), "ErrorResponse")
        assert not engine.active


def test_engine_failure_within_a_stream_is_an_event(api: httpx.Client, engine: Any) -> None:
    engine.fail_after = 2
    *chunks, error = stream(api)
    assert text_of(chunks) == "no"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert error["error"]["type"] == "server_error"
    validate(error, "ErrorResponse")


def test_one_failing_prompt_frees_the_others(api: httpx.Client, engine: Any) -> None:
    engine.fail_after = 3
    response = api.post("/v1/completions", json={"model": "alphabet", "prompt": ["A", "B", "C"]})
    assert response.status_code == 500
    assert not engine.active

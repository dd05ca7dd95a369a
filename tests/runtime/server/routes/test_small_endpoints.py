"""`/tokenize`, `/detokenize`, `/v1/embeddings`, `/v1/models`, `/health` and `/metrics`."""

import base64
import math
import re
import struct
from functools import partial
from typing import Any

import httpx
import pytest
from openai_schema import validate
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from servers import answer
from servers import answer as post

from compress.common.cli import tool_version
from runtime.core.request import Pooling


def test_models(api: httpx.Client) -> None:
    listing = api.get("/v1/models").json()
    assert [model["id"] for model in listing["data"]] == ["alphabet"]
    assert listing["data"][0]["max_model_len"] == 100
    assert api.get("/v1/models/alphabet").json() == listing["data"][0]


def test_health_follows_the_engine(api: httpx.Client, engine: Any) -> None:
    assert api.get("/health").json() == {"status": "ok", "reason": "", "running": 0, "waiting": 0}
    engine.failure = "the engine has made no progress for 130 s"
    response = api.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == engine.failure


def test_watchers_may_ask_for_the_head_only(api: httpx.Client) -> None:
    response = api.head("/health")
    assert (response.status_code, response.content) == (200, b"")


def samples(api: httpx.Client, **headers: str) -> dict[tuple[str, ...], float]:
    """Values of `/metrics` by name and labels."""
    response = api.get("/metrics", headers=headers)
    assert response.headers["content-type"] == CONTENT_TYPE_LATEST
    families = list(text_string_to_metric_families(response.text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    names = [sample.name for family in families for sample in family.samples]
    assert all(re.fullmatch(r"((runtime|process)_|vllm:)[a-z0-9_]+", name) for name in names)
    for family in families:
        assert family.type != "histogram" or family.name.endswith(("_seconds", "_tokens"))
        assert family.type != "counter" or {sample.name for sample in family.samples} <= {f"{family.name}_total"}
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics_are_prometheus_text_of_engine_requests_and_process(api: httpx.Client) -> None:
    before = samples(api)
    for name in ("generation_tokens_total", "prefix_cache_hits_total", "preemptions_total", "kv_cache_usage_perc"):
        assert (f"runtime_{name}",) in before
    assert before["process_resident_memory_bytes",] > 1e6
    assert before["runtime_build_info", "alphabet", tool_version()] == 1
    for path in ("/v1/models", "/v1/models/nothing", "/v1/models/others", "/nowhere", "/nor/here"):
        api.get(path)
    api.post("/v1/completions", json={"model": "alphabet", "prompt": "Z", "max_tokens": 2})
    api.request("BREW", "/v1/models")
    after = samples(api, accept="application/openmetrics-text; version=nonsense")
    added = {key[1:]: after[key] - before.get(key, 0) for key in after if key[0] == "runtime_http_requests_total"}
    assert {key: count for key, count in added.items() if count} == {
        ("GET", "/v1/models", "200"): 1,
        ("GET", "/v1/models/{name:path}", "404"): 2,
        ("GET", "unknown", "404"): 2,
        ("POST", "/v1/completions", "200"): 1,
        ("other", "/v1/models", "405"): 1,
        ("GET", "/metrics", "200"): 1,
    }


def test_openapi_describes_all_routes(api: httpx.Client) -> None:
    description = api.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(description["paths"])
    request = description["components"]["schemas"]["CompletionRequest"]
    assert request["additionalProperties"] == {"type": "null"}


def test_openapi_bounds_are_exact(api: httpx.Client) -> None:
    fields = api.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["seed"]["anyOf"][0] == {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63}
    assert isinstance(fields["seed"]["anyOf"][0]["exclusiveMaximum"], int)
    assert fields["model"]["enum"] == ["alphabet"]


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_prompt(api: httpx.Client) -> None:
    expected = {"tokens": [65, 195, 164], "count": 3, "max_model_len": 100}
    assert post(api, "/tokenize", prompt="Aä") == expected
    assert post(api, "/tokenize", model="alphabet", prompt="Aä", add_special_tokens=False) == expected
    with_text = post(api, "/tokenize", prompt="Aä", return_token_strs=True)
    assert with_text == {**expected, "token_strs": ["A", "\ufffd", "\ufffd"]}


def test_an_empty_prompt(api: httpx.Client) -> None:
    assert post(api, "/tokenize", prompt="")["tokens"] == []


def test_a_conversation_is_what_chat_would_read(api: httpx.Client) -> None:
    found = post(api, "/tokenize", messages=MESSAGES)
    assert bytes(found["tokens"]) == b"<user>Hi\n"
    chat = {"model": "alphabet", "messages": MESSAGES, "max_tokens": 1}
    assert post(api, "/v1/chat/completions", **chat)["usage"]["prompt_tokens"] == found["count"]


def test_there_and_back(api: httpx.Client) -> None:
    text = "A line, ünïcödé and 日本語 \U0001f600\n"
    assert post(api, "/detokenize", tokens=post(api, "/tokenize", prompt=text)["tokens"]) == {"prompt": text}
    assert post(api, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "either prompt or messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "only with prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "truncate": 5}, 400, "'truncate'"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "'other'"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, r"tokens\[1\]"),
        ("/detokenize", {"tokens": [1, 2**70]}, 400, r"tokens\[1\]"),
        ("/detokenize", {"tokens": [1, 256]}, 400, r"tokens\[1\].*id 256"),
        ("/detokenize", {"tokens": ["a"]}, 400, r"tokens\[0\]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "'other'"),
    ],
)
def test_refusals(api: httpx.Client, path: str, fields: dict[str, Any], status: int, words: str) -> None:
    response = api.post(path, json=fields)
    assert response.status_code == status, response.text
    assert re.search(words, response.json()["error"]["message"])


def test_what_clients_need_to_know_of_the_tokenizer(api: httpx.Client) -> None:
    found = api.get("/tokenizer_info").json()
    assert found["eos_token"] == "~"
    assert found["vocab_size"] == 256
    assert "message.role" in found["chat_template"]


embed = partial(answer, path="/v1/embeddings", model="alphabet")


@pytest.mark.parametrize(
    ("given", "first_bytes"), [("AB", [65]), (["AB", "C"], [65, 67]), ([65, 66], [65]), ([[65, 66], [67]], [65, 67])]
)
def test_all_kinds_of_input(api: httpx.Client, engine: Any, given: Any, first_bytes: list[int]) -> None:
    body, lengths = embed(api, input=given), [2, 1][: len(first_bytes)]
    validate(body, "CreateEmbeddingResponse")
    assert (body["object"], body["model"]) == ("list", "alphabet")
    assert body["data"] == [
        {"object": "embedding", "index": index, "embedding": [length / 3, float(byte), -1.5]}
        for index, (byte, length) in enumerate(zip(first_bytes, lengths, strict=True))
    ]
    assert body["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert all(options.embed for options in engine.options)


def test_base64_holds_float32(api: httpx.Client) -> None:
    found = embed(api, input="ABC", encoding_format="base64")["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(found)) == (1.0, 65.0, -1.5)


def test_vectors_of_length_1(api: httpx.Client) -> None:
    found = embed(api, input="ABC", normalize=True)["data"][0]["embedding"]
    length = math.hypot(1.0, 65.0, -1.5)
    assert found == pytest.approx([1.0 / length, 65.0 / length, -1.5 / length])


@pytest.mark.parametrize(("asked", "pooling"), [({}, Pooling.MEAN), ({"pooling": "last"}, Pooling.LAST)])
def test_the_engine_pools(api: httpx.Client, engine: Any, asked: dict[str, str], pooling: Pooling) -> None:
    embed(api, input="ABC", **asked)
    assert engine.options[-1].pooling is pooling


def test_more_inputs_than_the_queue_takes(api: httpx.Client) -> None:
    texts = ["x" * length for length in range(1, 12)]
    found = embed(api, input=texts)["data"]
    assert [entry["embedding"][0] for entry in found] == [length / 3 for length in range(1, 12)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "stream": True}, "stream"),
    ],
)
def test_wrong_fields_are_named(api: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = api.post("/v1/embeddings", json={"model": "alphabet", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_unknown_model(api: httpx.Client) -> None:
    assert api.post("/v1/embeddings", json={"model": "other", "input": "a"}).status_code == 404


def test_the_description_says_what_they_are(api: httpx.Client) -> None:
    described = api.get("/openapi.json").json()["paths"]["/v1/embeddings"]["post"]["description"]
    assert "Pooled hidden states" in described

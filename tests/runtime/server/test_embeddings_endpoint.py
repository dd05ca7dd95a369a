"""`/v1/embeddings`: every kind of input, both encodings, the order of the inputs, refusals."""

import base64
import struct
from functools import partial
from typing import Any

import httpx
import pytest
from openai_schema import validate
from servers import answer

embed = partial(answer, path="/v1/embeddings", model="alphabet")


@pytest.mark.parametrize(
    ("given", "first_bytes"),
    [("AB", [65]), (["AB", "C"], [65, 67]), ([65, 66], [65]), ([[65, 66], [67]], [65, 67])],
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
    assert "Mean-pooled hidden states" in described

"""`/tokenize` and `/detokenize`."""

import re
from typing import Any

import httpx
import pytest
from servers import answer as post

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

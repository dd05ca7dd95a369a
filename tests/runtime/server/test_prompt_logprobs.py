"""`prompt_logprobs` of completions and chats, in the form of vLLM's API."""

from typing import Any

import httpx
from servers import answer

COMPLETION = {"path": "/v1/completions", "model": "alphabet", "max_tokens": 1}
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_every_token_but_the_first(api: httpx.Client) -> None:
    for fields in ({"n": 2, "prompt": "XYZ"}, {"prompt": ["XYZ", "XYZ"]}):
        for choice in answer(api, **COMPLETION, prompt_logprobs=1, **fields)["choices"]:
            assert choice["prompt_logprobs"] == [
                None,
                {"89": {"logprob": -0.125, "rank": 1, "decoded_token": "Y"}},
                {"90": {"logprob": -0.25, "rank": 1, "decoded_token": "Z"}},
            ]


def test_chats_report_them_beside_their_choices(api: httpx.Client) -> None:
    fields = {"path": "/v1/chat/completions", "model": "alphabet", "messages": MESSAGES, "max_tokens": 1}
    found = answer(api, **fields, prompt_logprobs=0)["prompt_logprobs"]
    assert [each and next(iter(each.values()))["decoded_token"] for each in found[:3]] == [None, "u", "s"]
    assert "prompt_logprobs" not in answer(api, **fields)


def test_a_token_beyond_the_alternatives_has_no_rank(demo_server: tuple[str, Any, Any]) -> None:
    with httpx.Client(base_url=demo_server[0], timeout=60) as client:
        fields = {"path": "/v1/completions", "model": "demo", "max_tokens": 1}
        prompt = "The the zebra of"
        (choice,) = answer(client, **fields, prompt=prompt, prompt_logprobs=2)["choices"]
        (echoed,) = answer(client, **fields, prompt=prompt, echo=True, logprobs=2)["choices"]
    following = demo_server[2].encode(prompt)[1:]
    mine = [each[str(token)] for token, each in zip(following, choice["prompt_logprobs"][1:], strict=True)]
    assert [each["logprob"] for each in mine] == echoed["logprobs"]["token_logprobs"][1 : 1 + len(following)]
    assert any(each["rank"] is None for each in mine)
    ranks = [{other["rank"] for other in each.values()} for each in choice["prompt_logprobs"][1:]]
    assert all({1, 2} <= found for found in ranks)


def test_what_cannot_be_is_refused(api: httpx.Client) -> None:
    for fields in ({"stream": True}, {"echo": True, "logprobs": 1}):
        body = {"model": "alphabet", "prompt": "X", "prompt_logprobs": 2, **fields}
        response = api.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert "prompt_logprobs" in response.json()["error"]["message"]

"""`/v1/completions` with `echo` and `logprobs`: the prompt's tokens are scored, whole and streamed, alone with
`max_tokens` 0, for texts and token ids, for several prompts and several answers."""

from typing import Any

import httpx
import pytest
from openai_schema import NULL_WITHOUT_CONTEXT, validate
from servers import answer, streamed

ECHO = {"path": "/v1/completions", "model": "alphabet", "echo": True, "logprobs": 1}
MESSAGES = [{"role": "user", "content": "Hi"}]


def complete(api: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return answer(api, **ECHO | fields)["choices"]


def stream(api: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return [choice for chunk in streamed(api, **ECHO | fields) for choice in chunk["choices"]]


def joined(choices: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A streamed choice as if it had come whole."""
    mine = [choice for choice in choices if choice["index"] == index]
    pieces = [choice["logprobs"] for choice in mine if choice["logprobs"]]
    reasons = [choice["finish_reason"] for choice in mine if choice["finish_reason"]]
    assert len(reasons) == 1
    return {
        "index": index,
        "text": "".join(choice["text"] for choice in mine),
        "logprobs": {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]},
        "finish_reason": reasons[0],
    }


def test_prompt_and_answer_are_scored(api: httpx.Client) -> None:
    (choice,) = complete(api, prompt="XYZ", max_tokens=2)
    assert choice["text"] == "XYZno"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["X", "Y", "Z", "n", "o"],
        "token_logprobs": [None, -0.125, -0.25, -0.5, -0.5],
        "top_logprobs": [None, {"Y": -0.125}, {"Z": -0.25}, {"n": -0.5}, {"o": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }


def test_only_the_prompt(api: httpx.Client) -> None:
    (choice,) = complete(api, prompt="XYZ", max_tokens=0)
    assert (choice["text"], choice["finish_reason"]) == ("XYZ", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.125, -0.25]
    (alone,) = complete(api, prompt="X", max_tokens=0)
    assert (alone["text"], alone["logprobs"]["token_logprobs"]) == ("X", [None])


def test_a_prompt_as_long_as_the_context(api: httpx.Client) -> None:
    (choice,) = complete(api, prompt="x" * 100, max_tokens=0)
    assert len(choice["logprobs"]["tokens"]) == 100


def test_nothing_at_all(api: httpx.Client) -> None:
    found = answer(api, "/v1/completions", model="alphabet", prompt="XYZ", max_tokens=0)
    assert found["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
    assert found["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("XY", ["XY"]), ([88, 89], ["XY"]), (["XY", "Z"], ["XY", "Z"]), ([[88, 89], [90]], ["XY", "Z"])],
)
def test_streams_joined_are_the_whole(
    api: httpx.Client, prompt: Any, texts: list[str], n: int, max_tokens: int
) -> None:
    whole = complete(api, prompt=prompt, n=n, max_tokens=max_tokens)
    for index, choice in enumerate(whole):
        assert choice["text"].startswith(texts[index // n])
        assert len(choice["text"]) == len(texts[index // n]) + max_tokens
    choices = stream(api, prompt=prompt, n=n, max_tokens=max_tokens)
    assert [joined(choices, index) for index in range(len(whole))] == whole


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0}, {"n": 2, "prompt": ["XY", "Z"]}])
def test_answers_are_as_openai_publishes_them(api: httpx.Client, fields: dict[str, Any]) -> None:
    found = answer(api, **ECHO | {"prompt": "XYZ", "max_tokens": 2} | fields)
    validate(found, "CreateCompletionResponse", NULL_WITHOUT_CONTEXT)


def test_offsets_count_characters(api: httpx.Client) -> None:
    (choice,) = complete(api, prompt="aé日\U0001f600", max_tokens=1)
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert choice["text"][logprobs["text_offset"][-1] :] == logprobs["tokens"][-1]


def test_echo_without_logprobs_scores_nothing(api: httpx.Client, engine: Any) -> None:
    (choice,) = complete(api, prompt="XY", logprobs=None, max_tokens=1)
    assert (choice["text"], choice["logprobs"]) == ("XYm"[:3], None)
    assert engine.seen[-1].prompt_logprobs is None


@pytest.mark.parametrize("number", [0, 5])
def test_the_engine_is_asked_for_as_many(api: httpx.Client, engine: Any, number: int) -> None:
    complete(api, prompt="XY", logprobs=number)
    assert (engine.seen[-1].logprobs, engine.seen[-1].prompt_logprobs) == (number, number)


def test_steering_fields_reach_the_engine(api: httpx.Client, engine: Any) -> None:
    fields = {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -1}
    more = {"logit_bias": {"7": -100, "65": 2.5}, "stop_token_ids": [1, 2], "priority": -3, "max_tokens": 1}
    for path, prompt in (("completions", {"prompt": "Z"}), ("chat/completions", {"messages": MESSAGES})):
        answer(api, f"/v1/{path}", model="alphabet", **prompt, **fields, **more)
        sampling = engine.seen[-1]
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert sampling.logit_bias == ((7, -100.0), (65, 2.5))
        assert (sampling.stop_token_ids, engine.options[-1].priority) == ((1, 2), -3)

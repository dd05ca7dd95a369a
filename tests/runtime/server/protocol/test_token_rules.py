"""Fields that choose tokens, text and the beginning of an answer, with the demo model."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

GREEDY = {"model": "demo", "temperature": 0, "seed": 1}
PROMPT = "Once upon a time"


class Demo:
    def __init__(self, url: str, tokenizer: Any) -> None:
        self.client, self.tokenizer = httpx.Client(base_url=url, timeout=60), tokenizer

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json={**GREEDY, "prompt": PROMPT, "max_tokens": 12, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, **fields: Any) -> str:
        return self.complete(**fields)["choices"][0]["text"]

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
        body = {**GREEDY, "messages": messages, "max_tokens": 8, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def error(self, **fields: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json={**GREEDY, "prompt": PROMPT, **fields})
        assert response.status_code == 400, response.text
        return response.json()["error"]


@pytest.fixture(scope="module")
def demo(demo_server: tuple[str, Any, Any]) -> Iterator[Demo]:
    found = Demo(demo_server[0], demo_server[2])
    with found.client:
        yield found


def test_allowed_tokens_are_the_only_ones(demo: Demo) -> None:
    digits = [demo.tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "0123456789"]
    found = demo.text(allowed_token_ids=digits, temperature=1.0)
    assert len(found) == 12
    assert set(found) <= set("0123456789")


def test_bad_words_are_avoided_and_nothing_else_changes_before_them(demo: Demo) -> None:
    plain = demo.text(max_tokens=40)
    words = plain.split()
    word = max(words[3:-1], key=len)
    found = demo.text(max_tokens=40, bad_words=[word])
    assert word in plain
    assert f" {word}" not in found
    assert found.startswith(plain[: plain.index(word)].rstrip())


def test_an_answer_has_its_least_length(demo: Demo) -> None:
    first = demo.tokenizer.encode(PROMPT + demo.text(max_tokens=1), add_special_tokens=False)[-1]
    short = demo.complete(stop_token_ids=[first], max_tokens=20)
    assert short["usage"]["completion_tokens"] == 1
    long = demo.complete(stop_token_ids=[first], max_tokens=20, min_tokens=6)
    assert long["usage"]["completion_tokens"] >= 6
    assert short["choices"][0]["text"] == ""


def test_stop_strings_count_behind_the_least_length(demo: Demo) -> None:
    plain = demo.text(max_tokens=20)
    stop = plain[:4]
    assert demo.text(max_tokens=20, stop=stop) == ""
    kept = demo.text(max_tokens=20, stop=stop, min_tokens=8)
    assert kept.startswith(stop)
    assert plain.startswith(kept)


@pytest.mark.parametrize("streams", [False, True])
def test_the_stop_string_may_stay_in_the_text(demo: Demo, streams: bool) -> None:
    plain = demo.text(max_tokens=20)
    stop = plain[6:9]
    fields = {"max_tokens": 20, "stop": stop, "include_stop_str_in_output": True}
    if streams:
        body = {**GREEDY, "prompt": PROMPT, **fields, "stream": True}
        lines = demo.client.post("/v1/completions", json=body).text.splitlines()
        events = [httpx.Response(200, text=line[6:]).json() for line in lines if line.startswith("data: {")]
        found = "".join(choice["text"] for event in events for choice in event["choices"])
    else:
        found = demo.text(**fields)
    assert found == plain[: plain.index(stop) + len(stop)]


def test_special_tokens_may_stay_in_the_text(demo: Demo) -> None:
    name, token_id = next(iter(demo.tokenizer.special_ids.items()))
    fields = {"allowed_token_ids": [token_id], "ignore_eos": True, "max_tokens": 2}
    assert demo.text(**fields) == ""
    assert demo.text(**fields, skip_special_tokens=False) == 2 * name


def test_the_end_of_a_long_prompt_is_kept(demo: Demo) -> None:
    ids = demo.tokenizer.encode(PROMPT + " in a house", add_special_tokens=False)
    whole = demo.complete(prompt=ids[-3:])
    for prompt in (ids, PROMPT + " in a house"):
        found = demo.complete(prompt=prompt, truncate_prompt_tokens=3)
        assert found["usage"]["prompt_tokens"] == 3
        assert found["choices"][0]["text"] == whole["choices"][0]["text"]
    echoed = demo.text(prompt=ids, truncate_prompt_tokens=3, echo=True)
    assert echoed.startswith(demo.tokenizer.decode(ids[-3:]))


def test_a_text_beyond_the_context_fits_when_it_is_truncated(demo: Demo) -> None:
    assert demo.complete(prompt="word " * 40_000, truncate_prompt_tokens=20)["usage"]["prompt_tokens"] == 20


def test_the_last_message_is_continued(demo: Demo) -> None:
    begun = [{"role": "user", "content": "Tell a story"}, {"role": "assistant", "content": "Once upon a"}]
    answer = demo.chat(begun, continue_final_message=True).json()
    rendered = demo.tokenizer.render_chat(begun, add_generation_prompt=False)
    prompt = rendered[: rendered.rindex("Once upon a") + len("Once upon a")]
    whole = demo.complete(prompt=demo.tokenizer.encode(prompt, add_special_tokens=False), max_tokens=8)
    assert answer["choices"][0]["message"]["content"] == whole["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_the_answer_need_not_begin_a_turn(demo: Demo) -> None:
    said = [{"role": "user", "content": "Tell a story"}]
    with_turn, without = (
        demo.chat(said, **fields).json()["usage"]["prompt_tokens"] for fields in ({}, {"add_generation_prompt": False})
    )
    assert with_turn > without


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_a_continuation_needs_a_message_of_the_assistant(demo: Demo, fields: dict[str, Any]) -> None:
    assert demo.chat([{"role": "user", "content": "Hi"}], **fields).status_code == 400


def test_rules_that_exclude_each_other_are_an_error_of_the_request(demo: Demo) -> None:
    token_id = demo.tokenizer.encode("a", add_special_tokens=False)[0]
    fields = {"allowed_token_ids": [token_id], "bad_words": ["a"]}
    assert demo.error(**fields)["message"].startswith("Generation stopped: the request allows no token here.")
    assert "min_tokens" in demo.error(min_tokens=20, max_tokens=10)["message"]
    assert "allowed_token_ids" in demo.error(allowed_token_ids=[10**6])["message"]
    assert demo.error(allowed_token_ids=[])["param"] == "allowed_token_ids"


def test_repetitions_are_penalized(demo: Demo) -> None:
    first = demo.text(max_tokens=8)
    prompt = f"{PROMPT}{first} {PROMPT}"
    fields = {"prompt": prompt, "max_tokens": 8, "dry_allowed_length": 1, "dry_sequence_breakers": []}
    plain, other = (demo.text(dry_multiplier=value, **fields) for value in (0, 50))
    assert plain == demo.text(prompt=prompt, max_tokens=8)
    assert other != plain
    assert demo.text(dry_multiplier=50, **{**fields, "dry_sequence_breakers": list("aeiou,. ts")}) == plain


def test_filters_leave_what_they_say(demo: Demo) -> None:
    alone = {demo.text(max_tokens=5, temperature=2.0, seed=seed, top_n_sigma=1e-6) for seed in range(5)}
    assert alone == {demo.text(max_tokens=5)}
    assert demo.text(temperature=1.0, top_n_sigma=-1, typical_p=1) == demo.text(temperature=1.0)
    assert demo.text(temperature=1.0, xtc_probability=1, xtc_threshold=0.01) != demo.text(temperature=1.0)
    assert demo.error(typical_p=0)["param"] == "typical_p"

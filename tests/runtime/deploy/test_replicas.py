"""Keys of the start of a prompt, by which a replica is chosen."""

import json

from runtime.deploy.replicas import PART_BYTES, prefix_keys


def chat(*contents: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "demo", "messages": messages, **fields}).encode()


def test_longer_conversations_begin_with_the_keys_of_shorter_ones() -> None:
    first, second = "a" * 2 * PART_BYTES, "b" * 2 * PART_BYTES
    shorter, longer = prefix_keys(chat(first, temperature=0)), prefix_keys(chat(first, second, temperature=1))
    assert len(longer) > len(shorter) >= 2
    assert longer[:2] == shorter[:2]
    assert not set(prefix_keys(chat(second))) & set(longer)
    assert not set(prefix_keys(chat(first, cache_salt="alice"))) & set(longer)
    assert not set(prefix_keys(chat(first, tools=[{"type": "function"}]))) & set(longer)


def test_prompts_of_every_form_have_keys() -> None:
    for prompt in ("a" * 600, list(range(300)), [{"role": "user", "content": "a" * 600}]):
        for name in ("prompt", "input", "messages"):
            assert prefix_keys(json.dumps({"model": "demo", name: prompt}).encode())


def test_what_has_no_long_prompt_has_no_keys() -> None:
    for body in (b"", b"{", b"[1]", b"\xff", b"null", chat("short")):
        assert prefix_keys(body) == []

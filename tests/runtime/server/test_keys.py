"""API keys: their limits by a clock of the test, their file, and both over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.common.errors import ToolkitError
from runtime.server.errors import ApiError
from runtime.server.keys import Account, ApiKeys, KeyLimits, TokenBucket, TokenCount, load_accounts, read_accounts

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 3}
NUM_TOKENS = len("Z") + 3


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20_000)), min_size=1, max_size=30),
)
def test_a_bucket_spends_its_rate_and_at_most_one_use_more(per_minute: int, uses: list[tuple[float, int]]) -> None:
    bucket, now, spent, largest = TokenBucket(per_minute), 0.0, 0, max(amount for _, amount in uses)
    for pause, amount in uses:
        now += pause
        now += bucket.delay(now)
        assert bucket.delay(now) <= 1  # of rounding; whoever waits as told is served
        bucket.spend(amount, now)
        spent += amount
        assert spent <= per_minute * (1 + now / 60) + largest


def test_requests_of_a_minute() -> None:
    account = Account("a", KeyLimits(requests_per_minute=3))
    for _ in range(3):
        account.start_request(100.0)
    with pytest.raises(ApiError) as caught:
        account.start_request(101.0)
    assert (caught.value.status_code, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.headers == {"Retry-After": "19"}  # one request each 20 seconds
    account.start_request(120.0)
    with pytest.raises(ApiError):
        account.start_request(120.0)


def test_tokens_of_a_minute_are_charged_at_the_end() -> None:
    account = Account("a", KeyLimits(tokens_per_minute=60))
    account.start_request(0.0)
    account.charge(TokenCount(80, 39), 0.0)
    with pytest.raises(ApiError) as caught:
        account.start_request(0.0)
    assert caught.value.headers == {"Retry-After": "60"}  # 59 too many, and one for the next request
    account.start_request(60.0)


def test_places_are_given_back() -> None:
    account = Account("a", KeyLimits(max_requests=2))
    with account.hold(1), account.hold(1), pytest.raises(ApiError) as full, account.hold(1):
        pass
    with pytest.raises(ApiError) as never, account.hold(3):
        pass
    assert (full.value.status_code, never.value.status_code) == (429, 400)
    with account.hold(2):
        pass


FILE = """\
# two keys
- name: alice
  key: 0123
  max_requests: 8
- {name: bob, key: "b ö", requests_per_minute: 60, tokens_per_minute: 1000}
"""


def test_keys_of_a_file_stay_text(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(FILE)
    keys = ApiKeys(lambda: load_accounts("one", tmp_path / "keys.yaml"))
    for key, name in (("0123", "alice"), ("b ö".encode().decode("latin-1"), "bob"), ("one", "default")):
        assert keys.find(f"bearer {key}").name == name
    assert keys.find("Bearer 0123").limits == KeyLimits(max_requests=8)
    assert keys.find("Bearer 123") is None
    assert "0123" not in repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("", "", "list"),
        ("name: a\nkey: secret", "", "list"),
        ("- {name: a, key: secret}\n- secret", ":2", "mapping"),
        ("- name: a", ":1", "key"),
        ("- {name: a, key: ''}", ":1", "key"),
        ("- {name: ' ', key: secret}", ":1", "name"),
        ("- name: a\n  key: secret\n  max_request: 3", ":3", "'max_requests'"),
        ("- name: a\n  key: secret\n  max_requests: 2.5", ":3", "max_requests"),
        ("- name: a\n  key: secret\n  tokens_per_minute: 0", ":3", "tokens_per_minute"),
        ("- name: a\n  key: [secret]", ":2", "key"),
        ("- name: a\n  key: secret\n  key: other", ":3", "'key'"),
        ("- {name: a, key: secret}\n- {name: a, key: other}", ":2", "'a'"),
        ("- {name: a, key: secret}\n- {name: b, key: secret}", ":2", "'b'"),
        ("- {name: default, key: other}", ":1", "'default'"),
        ("- {name: b, key: one}", ":1", "'b'"),
        ("- {name: a, key: secret", ":1", "YAML"),
        ("- name: a\n  key: sec\x07ret", "", "YAML"),
        ("[" * 2000, "", "nested"),
    ],
)
def test_a_wrong_file_is_refused_at_its_place_without_its_keys(tmp_path: Path, text: str, line: str, word: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ToolkitError, match=word) as caught:
        load_accounts("one", file)
    assert f"{file}{line}" in caught.value.problem
    assert "secret" not in str(caught.value)


def test_an_empty_key_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="--api-key"):
        load_accounts(" ", None)
    with pytest.raises(ToolkitError, match=r"nowhere\.yaml"):
        list(read_accounts(tmp_path / "nowhere.yaml"))


def test_keys_that_are_loaded_again_go_on_where_they_were(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: one, tokens_per_minute: 5}\n- {name: b, key: two}")
    keys = ApiKeys(lambda: load_accounts(None, file))
    spent = keys.find("Bearer one")
    file.write_text("- {name: a, key: three, tokens_per_minute: 5}\n- {name: b, key: two, max_requests: 1}")
    keys.reload()
    assert keys.find("Bearer one") is None
    assert keys.find("Bearer three") is spent
    assert keys.find("Bearer two").limits.max_requests == 1
    file.write_text("- nonsense")
    with pytest.raises(ToolkitError):
        keys.reload()
    assert keys.find("Bearer three") is spent


Serve = Callable[..., tuple[str, Any]]


@pytest.fixture
def limited(serve_alphabet: Serve, tmp_path: Path) -> tuple[httpx.Client, Any]:
    """A server whose keys are named after their limit."""
    entries = ("max_requests: 2", "requests_per_minute: 2", f"tokens_per_minute: {NUM_TOKENS}")
    names = [entry.partition(":")[0] for entry in entries]
    lines = [f"- {{name: {name}, key: {name}, {entry}}}" for name, entry in zip(names, entries, strict=True)]
    (tmp_path / "keys.yaml").write_text("\n".join(lines))
    url, engine = serve_alphabet(keys=ApiKeys(lambda: load_accounts("free", tmp_path / "keys.yaml")))
    return httpx.Client(base_url=url, timeout=20), engine


def test_a_key_comes_in_either_header(limited: tuple[httpx.Client, Any]) -> None:
    sent: list[dict[str, str]] = [bearer("free"), {"x-api-key": "free"}, {"X-Api-Key": "other"}, {}]
    assert [limited[0].get("/v1/models", headers=each).status_code for each in sent] == [200, 200, 401, 401]


def check_limited(response: httpx.Response) -> None:
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(response.headers["retry-after"]) <= 60


@pytest.mark.parametrize(("name", "num_served"), [("requests_per_minute", 2), ("tokens_per_minute", 1)])
@pytest.mark.parametrize("stream", [False, True])
def test_limits_per_minute_hold_for_one_key(
    limited: tuple[httpx.Client, Any], name: str, num_served: int, stream: bool
) -> None:
    api, body = limited[0], {**COMPLETION, "stream": stream}
    for _ in range(num_served):
        assert api.post("/v1/completions", json=body, headers=bearer(name)).status_code == 200
    check_limited(api.post("/v1/completions", json=body, headers=bearer(name)))
    assert api.get("/v1/models", headers=bearer(name)).status_code == 200
    assert api.post("/v1/completions", json=body, headers=bearer("free")).status_code == 200


def test_abandoned_streams_are_charged(limited: tuple[httpx.Client, Any], wait_until: Any) -> None:
    api, engine = limited
    engine.close_gate_at = NUM_TOKENS
    body = {**COMPLETION, "max_tokens": 50, "stream": True}
    with api.stream("POST", "/v1/completions", json=body, headers=bearer("tokens_per_minute")) as response:
        lines = response.iter_lines()
        for _ in range(NUM_TOKENS):
            next(lines)
    wait_until(lambda: not engine.active)
    engine.gate.set()
    check_limited(api.post("/tokenize", json={"prompt": "x"}, headers=bearer("tokens_per_minute")))


def test_sequences_at_once_hold_for_one_key(limited: tuple[httpx.Client, Any], wait_until: Any) -> None:
    api, engine = limited
    headers = bearer("max_requests")
    too_many = api.post("/v1/completions", json={**COMPLETION, "n": 3}, headers=headers)
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (400, "too_many_answers")
    inputs = {"model": "alphabet", "input": ["a", "b", "c"]}
    assert len(api.post("/v1/embeddings", json=inputs, headers=headers).json()["data"]) == 3
    engine.close_gate_at = 1
    with api.stream("POST", "/v1/completions", json={**COMPLETION, "n": 2, "stream": True}, headers=headers) as first:
        lines = first.iter_lines()  # kept: its end closes the connection
        next(lines)
        check_limited(api.post("/v1/completions", json=COMPLETION, headers=headers))
    wait_until(lambda: not engine.active)
    engine.close_gate_at = None
    engine.gate.set()
    assert api.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200

"""One client fills its own part of the queue: who asks, and how many places are left to whom."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import is_idle, send_raw, serving_demo
from starlette.requests import Request
from tiers import examples

from runtime.core.config import Limits
from runtime.server.serving import client_of, places_left

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 2}


def request_of(address: str | None, **state: str) -> Request:
    return Request({"type": "http", "client": address and (address, 4000), "state": {"request_id": "r1", **state}})


def test_a_client_is_its_key_else_its_address_else_its_request() -> None:
    assert client_of(request_of("10.0.0.7", key_name="alice")) == "alice"
    assert client_of(request_of("10.0.0.7")) == "10.0.0.7"
    assert client_of(request_of(None)) == "r1"


@examples(200)
@given(
    limit=st.integers(1, 300),
    wishes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300)), min_size=1, max_size=60),
)
def test_places_of_clients(limit: int, wishes: list[tuple[int, int]]) -> None:
    """However greedy each is: one alone gets the limit, all together at most twice as much, and a new client half of
    what is free."""
    held = [0] * 10
    for client, wish in wishes:
        left, total = places_left(limit, held[client], sum(held)), sum(held)
        if total == held[client]:
            assert left == limit - total
        if held[client] == 0:
            assert left == (2 * limit - total + 1) // 2
            assert left or total == 2 * limit
        held[client] += min(wish, left)
        assert held[client] <= limit
        assert sum(held) <= 2 * limit


@pytest.fixture
def other_address(api: httpx.Client) -> Iterator[httpx.Client]:
    """A client of the same server from another address of this machine."""
    with httpx.Client(base_url=api.base_url, transport=httpx.HTTPTransport(local_address="127.0.0.2")) as client:
        yield client


def test_a_full_queue_of_one_client_is_open_to_another(
    api: httpx.Client, other_address: httpx.Client, engine: Any, wait_until: Any
) -> None:
    engine.gate.clear()
    with ThreadPoolExecutor(5) as pool:
        hanging = [pool.submit(api.post, "/v1/completions", json=COMPLETION) for _ in range(4)]
        wait_until(lambda: len(engine.active) == 4)
        hanging.append(pool.submit(other_address.post, "/v1/completions", json={**COMPLETION, "n": 2}))
        wait_until(lambda: len(engine.active) == 5)
        for client in (api, other_address):
            assert client.post("/v1/completions", json=COMPLETION).status_code == 429
        engine.gate.set()
        assert [future.result().status_code for future in hanging] == [200] * 5
    assert [options.client for options in engine.options] == ["127.0.0.1"] * 4 + ["127.0.0.2"]
    assert api.post("/v1/completions", json={**COMPLETION, "n": 4}).status_code == 200


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize(("path", "fields"), [("/v1/embeddings", {"input": "Z"}), ("/v1/completions", {"prompt": "Z"})])
def test_the_engine_learns_who_asks(serve_alphabet: Any, path: str, fields: dict[str, str], fair: bool) -> None:
    """By the name of the key; served in the order of arrival, all requests are one client's."""
    url, engine = serve_alphabet(limits=Limits(100, fair=fair), api_key="open sesame")
    headers = {"Authorization": "Bearer open sesame"}
    assert httpx.post(url + path, json={"model": "alphabet", **fields}, headers=headers).status_code == 200
    (options,) = engine.options
    assert (options.client == "") is not fair
    assert options.client != "127.0.0.1"


FLOODS = {
    "embeddings": ("/v1/embeddings", {"input": [[10 + index, *range(100, 1500)] for index in range(60)]}),
    "answers": ("/v1/completions", {"prompt": [*range(100, 200)], "n": 128, "max_tokens": 300, "ignore_eos": True}),
}
STEPS_OF_HTTP = 5
"""Most steps of the flood while a request comes to the engine and an answer to its client: a step takes far longer."""


@pytest.mark.slow
@pytest.mark.parametrize("flood", FLOODS)
def test_a_short_request_takes_its_own_steps_beside_a_flood(flood: str, wait_until: Any) -> None:
    path, body = FLOODS[flood]
    with serving_demo(256, num_blocks=512) as (url, engine, _):
        flooding = send_raw(url, path, "Connection: close", model="demo", **body)
        wait_until(lambda: len(engine.scheduler.running) + len(engine.scheduler.waiting) >= 32)
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=300) as client:
            for num_tokens in (1, 20):
                before = engine.metrics.steps_total
                short = {"model": "demo", "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True}
                response = client.post(f"{url}/v1/completions", json=short)
                assert response.status_code == 200
                assert num_tokens <= engine.metrics.steps_total - before <= 1 + num_tokens + STEPS_OF_HTTP
        assert engine.has_work, "the flood was too small"
        flooding.close()
        wait_until(lambda: is_idle(engine))

"""Two replicas of the demo model in a local Ray."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_command import ENVIRONMENT
from servers import answer, free_port

from compress.common.cli import demo_model_path

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.full

NAME = f"demo-{os.getpid()}"
CONFIG = {"device": "cpu", "dtype": "float32"}


def deploy(min_replicas: int = 2, **options: Any) -> None:
    from ray import serve

    from runtime.deploy.ray import app

    fixed = {"model": demo_model_path(), "name": "demo", "num_cpus": 0.5, "config": CONFIG}
    serve.run(app({**fixed, "min_replicas": min_replicas, **options}), name=NAME)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from ray import serve

    port = free_port()
    environment = {name: ENVIRONMENT[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy()
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def api(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as api:
        yield api


def replicas() -> list[int]:
    """Processes of the replicas."""
    title = f"ray::ServeReplica:{NAME}:Replica"
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_text().startswith(title):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def prompt(number: int) -> str:
    return f"{number} " * 200


async def stream(client: httpx.AsyncClient, number: int, tokens: int = 600) -> list[str]:
    """Lines of a stream; of one that breaks, those until then."""
    body = {"model": "demo", "prompt": prompt(number), "max_tokens": tokens, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines += [line] if line else []
    except httpx.RemoteProtocolError:
        pass
    return lines


def is_whole(lines: list[str]) -> bool:
    return lines[-1:] == ["data: [DONE]"] and not any('"error"' in line for line in lines)


def test_answers_streams_and_errors_are_those_of_one_server(api: httpx.Client) -> None:
    assert api.get("/health").json()["status"] == "ok"
    found = answer(api, "/v1/completions", model="demo", prompt="Once", max_tokens=4, temperature=0)
    assert found["usage"]["completion_tokens"] == 4
    refused = api.post("/v1/completions", json={"model": "other", "prompt": "Once"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert api.get("/nowhere").status_code == 404
    assert api.head("/health").status_code == 200
    assert len(replicas()) == 2


def test_streams_come_piece_by_piece(api: httpx.Client) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    with api.stream("POST", "/v1/completions", json=body) as response:
        times = [time.monotonic() - began for line in response.iter_lines() if line]
    assert len(times) > 10
    assert times[0] < times[-1] / 2


def test_the_same_start_is_found_in_the_cache(api: httpx.Client) -> None:
    def cached(text: str) -> int:
        body = {"model": "demo", "prompt": text, "max_tokens": 1}
        return answer(api, "/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    prompts = [prompt(100 + number) for number in range(6)]
    assert [cached(text) for text in prompts] == [0] * 6
    assert all(cached(f"{text}and so on") > 100 for text in prompts)


def test_a_client_that_leaves_frees_its_replica(api: httpx.Client) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    for _ in range(4):
        with api.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    deadline = time.monotonic() + 5
    while any(api.get("/health").json()["running"] for _ in range(10)):  # answered by either replica
        assert time.monotonic() < deadline


def test_only_requests_of_a_killed_replica_fail(url: str, api: httpx.Client) -> None:
    async def crowd() -> tuple[list[list[str]], list[int]]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            whole = {"model": "demo", "max_tokens": 300, "ignore_eos": True}
            streams = [asyncio.create_task(stream(client, number)) for number in range(8)]
            posts = [client.post("/v1/completions", json=whole | {"prompt": prompt(n)}) for n in range(20, 26)]
            answers = [asyncio.create_task(post) for post in posts]
            await asyncio.sleep(1)
            os.kill(replicas()[0], signal.SIGKILL)
            return await asyncio.gather(*streams), [each.status_code for each in await asyncio.gather(*answers)]

    streams, statuses = asyncio.run(crowd())
    assert 0 < sum(map(is_whole, streams)) < len(streams)
    assert statuses == [200] * len(statuses)  # nothing was written yet, so another replica answers
    deadline = time.monotonic() + 60
    while len(replicas()) < 2:
        answer(api, "/v1/completions", model="demo", prompt="Once", max_tokens=1)
        assert time.monotonic() < deadline


def test_no_request_fails_while_replicas_are_replaced(url: str) -> None:
    before = replicas()

    async def load() -> list[list[str]]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            update = asyncio.create_task(asyncio.to_thread(deploy, config=CONFIG | {"num_blocks": 512}))
            found = []
            while not update.done():
                found += await asyncio.gather(*(stream(client, number, tokens=50) for number in range(4)))
            await update
            return found

    assert all(map(is_whole, asyncio.run(load())))
    assert not set(before) & set(replicas())


def test_a_queue_adds_a_replica(url: str) -> None:
    from ray import serve

    serve.delete(NAME)  # Ray waits for minutes before it ends a replica that is idle
    deploy(min_replicas=1, max_replicas=2, target_ongoing_requests=1)
    assert len(replicas()) == 1
    deadline = time.monotonic() + 120

    async def load() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            while len(replicas()) < 2:
                assert time.monotonic() < deadline
                assert all(map(is_whole, await asyncio.gather(*(stream(client, number, 100) for number in range(6)))))

    asyncio.run(load())

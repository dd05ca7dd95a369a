"""The backend of Dynamo: the contract of its engines, and answers through Dynamo's own frontend."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_command import ENVIRONMENT
from servers import answer, free_port

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM

if importlib.util.find_spec("dynamo") is None:
    pytest.skip("needs ai-dynamo", allow_module_level=True)

from runtime.deploy.dynamo import DynamoEngine

ARGUMENTS = ["--model", "demo", "--config", '{"device": "cpu", "dtype": "float64", "linear_backend": "reference"}']
PROMPT = list(range(20, 60))


class Context:
    """The part of Dynamo's context that engines read."""

    def __init__(self, stops_after: int = 10**6) -> None:
        self.left = stops_after

    def is_stopped(self) -> bool:
        self.left -= 1
        return self.left < 0


@asynccontextmanager
async def started() -> AsyncIterator[DynamoEngine]:
    engine, _ = await DynamoEngine.from_args(ARGUMENTS)
    await engine.start(worker_id=1)
    try:
        yield engine
    finally:
        await engine.cleanup()
        await engine.cleanup()  # a second one has no effect


def request(max_tokens: int = 12, **options: Any) -> dict[str, Any]:
    stops = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": PROMPT, "stop_conditions": stops, "sampling_options": {"temperature": 0.0, **options}}


async def collect(engine: DynamoEngine, body: dict[str, Any], context: Context | None = None) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(body, context or Context())]


def test_concurrent_answers_are_those_of_the_engine_and_end_with_reason_and_usage() -> None:
    async def crowd() -> list[list[dict[str, Any]]]:
        async with started() as engine:
            return await asyncio.gather(*(collect(engine, request()) for _ in range(4)))

    llm = LLM(demo_model_path(), RuntimeConfig(device="cpu", dtype="float64", linear_backend="reference"))
    (alone,) = llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    for chunks in asyncio.run(crowd()):
        assert [token for chunk in chunks for token in chunk["token_ids"]] == alone.token_ids
        assert all(chunk["index"] == 0 for chunk in chunks)
        assert [chunk.get("finish_reason") for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert chunks[-1]["completion_usage"] == {"prompt_tokens": 40, "completion_tokens": 12, "total_tokens": 52}


def test_choices_logprobs_and_defaults() -> None:
    async def ask() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with started() as engine:
            two = await collect(engine, request(4, n=2, seed=1, top_k=-1) | {"output_options": {"logprobs": 1}})
            return two, await collect(engine, {"token_ids": PROMPT[:1], "stop_conditions": {"stop_token_ids": None}})

    two, unlimited = asyncio.run(ask())
    assert {chunk["index"] for chunk in two if "finish_reason" in chunk} == {0, 1}
    assert all(len(chunk["log_probs"]) == len(chunk["token_ids"]) for chunk in two)
    assert unlimited[-1]["finish_reason"] in ("stop", "length")


def test_a_cancelled_request_ends_and_frees_its_memory() -> None:
    async def cancel() -> list[dict[str, Any]]:
        async with started() as engine:
            chunks = await collect(engine, request(1000), Context(stops_after=6))
            inner = engine.served.client.engine
            for _ in range(200):
                if not inner.has_work:
                    break
                await asyncio.sleep(0.01)
            assert not inner.has_work
            return chunks

    chunks = asyncio.run(cancel())
    assert chunks[-1]["finish_reason"] == "cancelled"
    assert chunks[-1]["completion_usage"]["completion_tokens"] < 1000


def test_refused_requests_and_engines_that_are_not_started_raise() -> None:
    async def refuse() -> None:
        async with started() as engine:
            with pytest.raises(RequestError):
                await collect(engine, request() | {"token_ids": [10**6]})
            with pytest.raises(RequestError, match="guided"):
                await collect(engine, request(guided_decoding={"regex": "a"}))
        with pytest.raises(RuntimeError):
            await collect(engine, request())

    asyncio.run(refuse())


def test_the_canary_of_dynamo_is_answered() -> None:
    async def probe() -> list[dict[str, Any]]:
        async with started() as engine:
            return await collect(engine, await engine.health_check_payload())

    assert asyncio.run(probe())[-1]["finish_reason"] == "length"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    begun: list[subprocess.Popen[bytes]] = []
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DYN_FILE_KV": f"{tmp_path}/kv",
    }

    def start(*command: str) -> None:
        begun.append(subprocess.Popen([sys.executable, "-m", *command], env=environment, cwd=tmp_path))

    yield start
    for process in begun:
        process.kill()
        process.wait()


@pytest.mark.full
def test_dynamos_frontend_serves_the_model(processes: Any) -> None:
    port = free_port()
    planes = ["--discovery-backend", "file", "--request-plane", "tcp"]
    processes("runtime.deploy.dynamo", *ARGUMENTS, "--served-model-name", "demo", *planes)
    processes("dynamo.frontend", "--http-port", str(port), *planes)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as api:
        deadline = time.monotonic() + 60
        while not listed(api):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        found = answer(api, "/v1/completions", model="demo", prompt="Once upon", max_tokens=8, temperature=0)
        assert found["usage"]["completion_tokens"] <= 8
        (alone,) = LLM(
            demo_model_path(), RuntimeConfig(device="cpu", dtype="float64", linear_backend="reference")
        ).generate(["Once upon"], SamplingParams(max_tokens=8, temperature=0))
        assert found["choices"][0]["text"] == alone.text


def listed(api: httpx.Client) -> bool:
    try:
        return bool(api.get("/v1/models").json()["data"])
    except httpx.TransportError:
        return False

#!/usr/bin/env python
"""Measures replicas of a model in a local Ray, or engines of one server (`--engines`): tokens per second of one
and of two, and prompt tokens found in the cache with and without routing by prefix.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python scripts/bench_replicas.py
    OMP_WAIT_POLICY=passive python scripts/bench_replicas.py --engines     # one engine has the cores of two
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from compress.common.cli import demo_model_path

PORT = 18_517
ROOT = Path(__file__).parents[1]


Serving = Callable[[Path, int, bool], AbstractContextManager[str]]
"""Serves a model by a number of replicas, with or without routing by prefix; yields the URL."""


@contextmanager
def engines(model: Path, number: int, routed: bool) -> Iterator[str]:
    """Runs a server with several engines, which share the cores."""
    from runtime.bench.run import run_server

    routing = "--prefix-routing" if routed else "--no-prefix-routing"
    options = ["--served-model-name", "demo", "--device", "cpu", "--data-parallel-size", str(number), routing]
    with run_server(model, options) as server:
        yield server.url


@contextmanager
def replicas(model: Path, number: int, routed: bool) -> Iterator[str]:
    """Runs replicas with one thread each."""
    from ray import serve

    from runtime.deploy.ray import app

    fixed = {"name": "demo", "min_replicas": number, "num_cpus": 0.5, "config": {"device": "cpu"}}
    serve.run(app({"model": model, "prefix_routing": routed, **fixed}))
    yield f"http://127.0.0.1:{PORT}"
    serve.delete("default")


async def post(client: httpx.AsyncClient, prompt: str, tokens: int) -> dict[str, Any]:
    """Returns the answer to a prompt."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    return response.raise_for_status().json()


async def throughput(url: str, requests: int, tokens: int, concurrency: int) -> float:
    """Returns generated tokens per second."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(post(client, f"{number} warm", 4) for number in range(concurrency)))
        places, began = asyncio.Semaphore(concurrency), time.perf_counter()

        async def one(number: int) -> None:
            async with places:
                await post(client, f"{number} " * 40, tokens)

        await asyncio.gather(*map(one, range(requests)))
        return requests * tokens / (time.perf_counter() - began)


async def hits(url: str, conversations: int, turns: int, together: int = 8) -> float:
    """Returns the share of prompt tokens found in the cache, for conversations whose turns come in random order."""
    order = [number for number in range(conversations) for _ in range(turns)]
    Random(0).shuffle(order)
    texts, cached, total = {number: f"{number} " * 60 for number in range(conversations)}, 0, 0
    locks = {number: asyncio.Lock() for number in texts}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        places = asyncio.Semaphore(together)

        async def turn(number: int) -> None:
            nonlocal cached, total
            async with locks[number], places:
                answer = await post(client, texts[number], 16)
                usage = answer["usage"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                total += usage["prompt_tokens"]
                texts[number] += answer["choices"][0]["text"] + " And then? " * 10

        await asyncio.gather(*map(turn, order))
    return cached / total


@contextmanager
def local_ray() -> Iterator[None]:
    """Starts Ray and its proxy on this machine."""
    import ray
    from ray import serve

    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    store = 100 * 2**20
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=store,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield
    serve.shutdown()
    ray.shutdown()


def measure(serving: Serving, args: argparse.Namespace) -> None:
    """Prints one line for each measurement."""
    what = "engines" if args.engines else "replicas"
    for number in (1, 2) * args.rounds:
        with serving(args.model, number, True) as url:
            rate = asyncio.run(throughput(url, args.requests, args.tokens, args.concurrency))
            print(f"{number} {what}: {rate:.0f} tokens/s", flush=True)
    for number, routed in ((2, True), (2, False), (1, True)):
        with serving(args.model, number, routed) as url:
            share = asyncio.run(hits(url, args.conversations, args.turns))
            routing = f"routing by prefix {'on' if routed else 'off'}"
            print(f"{number} {what}, {routing}: {share:.1%} of prompt tokens cached", flush=True)


def main() -> None:
    """Measures what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", action="store_true", help="engines of one server in place of Ray's replicas")
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if args.engines:
        measure(engines, args)
    else:
        with local_ray():
            measure(replicas, args)


if __name__ == "__main__":
    main()

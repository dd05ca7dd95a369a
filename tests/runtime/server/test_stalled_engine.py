"""An engine that hangs, behind the whole server: clients hear of it in time, `/health` says so, and both recover."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_runner import FakeRunner

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.engine.engine_thread import EngineThread
from runtime.server.app import create_app
from runtime.server.serving import Limits
from runtime.text.tokenizer import Tokenizer

STALL_SECONDS = 1.0
MARGIN = 20.0  # of a busy machine
BODY = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True}


class HangingRunner(FakeRunner):
    """Steps wait while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__(2000, 4, 1000)
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(0.002)
        self.gate.wait()
        return super().execute(plan)


@pytest.fixture
def served(run_server: Any) -> Iterator[tuple[str, HangingRunner, Engine]]:
    runner = HangingRunner()
    tokenizer = Tokenizer.open(demo_model_path())
    engine = Engine(runner, tokenizer, RuntimeConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=16))
    thread = EngineThread(engine, stall_seconds=STALL_SECONDS)
    app = create_app(thread, tokenizer, "fake", Limits(1000), render_metrics=engine.metrics.render)
    with run_server(app) as url:
        yield url, runner, engine
        runner.gate.set()


def test_everybody_hears_of_a_hang_and_it_ends(served: tuple[str, HangingRunner, Engine], wait_until: Any) -> None:
    url, runner, engine = served

    def ask(stream: bool) -> tuple[httpx.Response, float]:
        response = httpx.post(f"{url}/v1/completions", json={**BODY, "stream": stream}, timeout=30)
        return response, time.monotonic()

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, index % 2 == 0) for index in range(8)]
        wait_until(lambda: len(engine.scheduler.running) == 8)
        assert httpx.get(f"{url}/health").status_code == 200
        runner.gate.clear()
        start = time.monotonic()
        for future in asked:
            response, end = future.result()
            assert end - start < STALL_SECONDS + MARGIN
            check_told(response)
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "no progress for" in health.json()["reason"]
    late, _ = ask(stream=False)
    assert late.status_code == 500  # at once, not after another wait
    runner.gate.set()
    wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
    assert ask(stream=False)[0].status_code == 200
    wait_until(lambda: not engine.has_work)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def check_told(response: httpx.Response) -> None:
    """An error with its reason: as the answer, or as the last event of a stream."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *_, error, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert done == "[DONE]"
        body = json.loads(error)
    else:
        assert response.status_code == 500
        body = response.json()
    assert "no progress for" in body["error"]["message"]
    assert body["error"]["code"] == "generation_failed"

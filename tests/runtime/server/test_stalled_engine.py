"""An engine that hangs, behind the whole server: clients hear of it in time, `/health` says so, and both recover."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_runner import FakeRunner
from servers import events, is_idle, serving_engine

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.text.tokenizer import Tokenizer

STALL_SECONDS = 1.0
MARGIN = 20.0  # of a busy machine
BODY = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True}


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
def served() -> Iterator[tuple[str, HangingRunner, Engine]]:
    runner, tokenizer = HangingRunner(), Tokenizer.open(demo_model_path())
    engine = Engine(runner, tokenizer, RuntimeConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=16))
    with serving_engine(engine, tokenizer, stall_seconds=STALL_SECONDS) as url:
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
    wait_until(lambda: is_idle(engine))


def check_told(response: httpx.Response) -> None:
    """An error with its reason: as the answer, or as the last event of a stream."""
    if response.headers["content-type"].startswith("text/event-stream"):
        body = events(response.text)[-1]
    else:
        assert response.status_code == 500
        body = response.json()
    assert "no progress for" in body["error"]["message"]
    assert body["error"]["code"] == "generation_failed"

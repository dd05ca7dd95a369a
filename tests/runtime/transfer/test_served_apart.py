"""`runtime serve` with prefill and decode in separate processes: over HTTP the answers are those of one engine, also
when a process is killed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_command import runtime_here, serving
from servers import answer, events, serving_demo

from compress.common.cli import demo_model_path

EXACT = ("--device", "cpu", "--dtype", "float64", "--linear-backend", "reference", "--kv-memory", "16MiB")
PROMPTS = [f"{number} times the history of the city begins. " * 12 for number in range(4)]
BODIES = [
    {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0},
    {"prompt": PROMPTS[1], "max_tokens": 24, "seed": 1, "n": 3},
    {"prompt": PROMPTS[2], "max_tokens": 60, "seed": 2, "stop": ["e"]},
    {"prompt": PROMPTS[3], "max_tokens": 24, "seed": 3, "logprobs": 2},
]


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Serves the demo model in processes, prompts of any length apart."""
    command = (str(demo_model_path()), *EXACT, "--local-prefill", "0", *options)
    with serving(*command, cwd=folder) as (process, url, _), httpx.Client(base_url=url, timeout=60) as api:
        yield process, api


def ask_all(api: httpx.Client) -> list[Any]:
    with ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(lambda body: answer(api, "/v1/completions", model="demo", **body)["choices"], BODIES))


def rounded(choices: Any) -> Any:
    """The last digits of float64 depend on who shared the steps."""
    if isinstance(choices, dict):
        return {name: rounded(value) for name, value in choices.items()}
    if isinstance(choices, list):
        return [rounded(value) for value in choices]
    return round(choices, 9) if isinstance(choices, float) else choices


def streamed_text(api: httpx.Client, **body: Any) -> str:
    response = api.post("/v1/completions", json={"model": "demo", "stream": True, **body})
    return "".join(event["choices"][0]["text"] for event in events(response.text))


def value(api: httpx.Client, name: str, label: str = "") -> float:
    """Sum of a metric over the engines."""
    lines = [each for each in api.get("/metrics").text.splitlines() if each.startswith(name) and label in each]
    return sum(float(each.rpartition(" ")[2]) for each in lines)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def received(api: httpx.Client, result: str = "received") -> float:
    return value(api, "runtime_remote_prefills_total", f'result="{result}"')


def ask_until_received(api: httpx.Client, count: int) -> None:
    """Sends prompts until the pages of this many came from another engine: engines connect when they have started."""
    prompts = ([*range(5, 100), count, number] for number in range(5, 1000))
    until(lambda: answer(api, "/v1/completions", model="demo", prompt=next(prompts)[::-1]) and received(api) >= count)


def children(process: subprocess.Popen[str]) -> list[int]:
    """Processes of the engines, in the order of their start."""
    return sorted(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    with serving_demo() as (url, _, _), httpx.Client(base_url=url, timeout=60) as api:
        return rounded(ask_all(api))


@pytest.mark.full
def test_answers_over_http_also_when_a_process_is_killed(tmp_path: Path, wanted: list[Any]) -> None:
    with served(tmp_path, "--prefill-engines", "1") as (process, api):
        ask_until_received(api, 1)
        before = received(api)
        assert rounded(ask_all(api)) == wanted
        assert received(api) == before + len(BODIES)
        assert streamed_text(api, **BODIES[0]) == wanted[0][0]["text"]
        decode, prefill = children(process)
        os.kill(prefill, signal.SIGSTOP)
        fresh = {**BODIES[0], "prompt": "And " + PROMPTS[0]}
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(streamed_text, api, **fresh)
            until(lambda: value(api, "runtime_num_remote_prefills"))
            os.kill(prefill, signal.SIGKILL)
            text = late.result(60)
        assert text == streamed_text(api, **fresh) != ""
        assert received(api, "failed") == 1
        assert api.get("/health").status_code == 200
        assert rounded(ask_all(api)) == wanted
        assert value(api, "runtime_kv_cache_usage_perc") == 0
        os.kill(decode, signal.SIGKILL)
        assert process.wait(30) != 0
    assert not list(Path("/dev/shm").glob("*pages*"))


@pytest.mark.full
def test_two_servers(tmp_path: Path, wanted: list[Any]) -> None:
    """One computes prompts for the other, ends, and comes back."""
    apart = ("--transfer-socket", str(tmp_path / "prefill"), "--role")
    with served(tmp_path, *apart, "decode") as (_, api):
        assert rounded(ask_all(api)) == wanted, "no other server is there"
        for count in (1, 2):
            with served(tmp_path, *apart, "prefill") as (_, prefill):
                ask_until_received(api, count)
                assert value(prefill, "runtime_transferred_blocks_total") >= 6
        assert rounded(ask_all(api)) == wanted


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--role", "prefill"), "0 of --transfer-socket"),
        (("--transfer-socket", "x"), "--role both with 1"),
        (("--role", "decode", "--transfer-socket", "x", "--prefill-engines", "1"), "does not go with --role decode"),
        (("--prefill-engines", "1", "--no-api-process"), "--no-api-process"),
        (("--prefill-engines", "1", "--tensor-parallel-size", "2"), "pages of 2 processes"),
        (("--prefill-engines", "1", "--kv-cache", "int8", "--kv-residual-length", "8"), "outside of the pages"),
    ],
)
def test_options_that_contradict_each_other(tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    ended = runtime_here("serve", str(demo_model_path()), "--port", "0", *options, cwd=tmp_path)
    assert ended.returncode == 1
    assert problem in ended.stderr

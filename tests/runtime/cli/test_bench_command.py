"""`runtime bench` against the demo model over real HTTP."""

import json
import os
import re
import signal
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_command import runtime, runtime_here, start

from compress.common.cli import demo_model_path
from runtime.bench.run import run_server

SMALL = ["--input-len", "8:24", "--output-len", "4:12", "--num-warmups", "2"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = ["--api-key", "secret", "--max-requests", "3", "--max-num-seqs", "2"]
    with run_server(demo_model_path(), options) as own:
        yield own.url


@pytest.mark.full
def test_own_server_closed_loop_writes_json_and_plot(tmp_path: Path) -> None:
    files = ["--json", "b.json", "--plot", "b.svg", "--slo", "ttft=100s,itl=100s,tpot=100s,e2e=0.001ms"]
    result = runtime("bench", "-n", "12", "-c", "3", *SMALL, "--prefix-len", "32", *files, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "b.json").read_text())
    figures = found["figures"]
    assert (figures["complete"], figures["refused"], figures["failed"]) == (12, 0, 0)
    assert figures["peak_concurrency"] == 3
    assert figures["goodput"] == {"share": 0.0, "requests_per_s": 0.0}
    assert figures["cached_tokens"] >= 32 * 6  # all but the first three requests find the prefix
    assert figures["latency_ms"]["ttft"]["p50"] <= figures["latency_ms"]["e2e"]["p50"]
    assert all(40 <= request["prompt_tokens"] <= 56 for request in found["requests"])  # prefix and own tokens
    assert all(4 <= request["output_tokens"] <= 12 for request in found["requests"])
    assert sum(request["output_tokens"] for request in found["requests"]) == figures["output_tokens"]
    assert found["command"].startswith("runtime bench -n 12")
    assert found["load"] == "closed loop, concurrency 3"
    ElementTree.parse(tmp_path / "b.svg")
    for words in ("first token (ttft)", "between tokens (itl)", "throughput", "goodput     0.0%"):
        assert words in result.stdout


def test_open_loop_beyond_the_queue_counts_refusals(url: str, tmp_path: Path) -> None:
    options = ["--url", url, "--api-key", "secret", "--request-rate", "400", "-n", "40", "--json", "b.json"]
    result = runtime("bench", str(demo_model_path()), *options, *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "b.json").read_text())
    figures = found["figures"]
    assert "--api-key KEY" in found["command"]
    assert figures["complete"] + figures["refused"] == 40
    assert figures["complete"] >= 3
    assert figures["refused"] > 10
    assert figures["failed"] == 0
    assert "queue" in next(iter(figures["errors"]))
    starts = [request["start_s"] for request in found["requests"]]
    assert starts == sorted(starts)


def test_prompts_of_a_file_through_both_routes(url: str, tmp_path: Path) -> None:
    lines = [{"prompt": "The castle"}, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = [
        "--url",
        f"{url}/v1",
        "--api-key",
        "secret",
        "-n",
        "4",
        "-c",
        "1",
        "--output-len",
        "5",
        "--json",
        "b.json",
    ]
    result = runtime_here("bench", *options, "--prompts", "p.jsonl", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    requests = json.loads((tmp_path / "b.json").read_text())["requests"]
    assert [request["output_tokens"] for request in requests] == [5, 3, 5, 3]


def test_the_server_tokenizes_when_no_folder_is_named(url: str, tmp_path: Path) -> None:
    options = ["--url", url, "--api-key", "secret", "-n", "3", "-c", "1", "--json", "b.json"]
    result = runtime_here("bench", *options, "--input-len", "10", "--output-len", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    requests = json.loads((tmp_path / "b.json").read_text())["requests"]
    assert [request["prompt_tokens"] for request in requests] == [10, 10, 10]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--request-rate", "1", "--max-concurrency", "2"], 1, "exclude each other"),
        (["--input-len", "9:3"], 1, "as 128"),
        (["--slo", "ttft"], 1, "is not an objective"),
        (["--prompts", "nowhere"], 1, "there is no file nowhere"),
        (["--url", "http://127.0.0.1:1"], 1, r"from 127\.0\.0\.1:1"),
        (["--url", "nonsense"], 1, "is not a URL"),
        (["--url", "http://127.0.0.1:1", "--serve", "--max-num-seqs 1"], 1, "Use one of them"),
        (["--json", "no/such/folder/x.json"], 1, "no/such/folder"),
        (["--json", "."], 1, r"\. is a folder"),
        (["--serve", "--served-model-name 'x"], 1, "No closing quotation"),
        (["--serve", "--max-len 5"], 1, "the server did not start: No such option"),
        (["--serve", "--max-seqs 3"], 1, r"--max-seqs.*\(Possible"),
    ],
)
def test_refusals_are_one_line(arguments: list[str], status: int, words: str, tmp_path: Path) -> None:
    result = runtime_here("bench", "-n", "2", *arguments, cwd=tmp_path)
    assert result.returncode == status
    assert re.search(words, result.stderr)
    assert "Traceback" not in result.stderr


def test_wrong_key_ends_with_the_server_s_words(url: str, tmp_path: Path) -> None:
    result = runtime_here("bench", "--url", url, "-n", "1", cwd=tmp_path)
    assert result.returncode == 1
    assert re.search("401.*--api-key", result.stderr)


def test_prompts_that_never_fit_are_refused_in_the_warm_up(url: str, tmp_path: Path) -> None:
    options = ["--url", url, "--api-key", "secret", "-n", "2", "--input-len", "4000"]
    result = runtime_here("bench", str(demo_model_path()), *options, cwd=tmp_path)
    assert result.returncode == 1
    assert "4000 tokens" in result.stderr
    result = runtime_here("bench", str(demo_model_path()), *options, "--num-warmups", "0", cwd=tmp_path)
    assert result.returncode == 1
    assert "complete" in result.stderr
    assert "2 failed" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_no_server_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    bench = start("bench", "-n", "1000", "--output-len", "500", cwd=tmp_path)
    child = wait_for_child(bench.pid)
    time.sleep(1)
    bench.send_signal(number)
    bench.communicate(timeout=120)
    end = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < end, "the server outlived its benchmark"
        time.sleep(0.05)


def wait_for_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.parent.is_dir():
        pytest.skip("needs /proc")
    end = time.monotonic() + 120
    while not (found := children.read_text().split()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return int(found[0])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False

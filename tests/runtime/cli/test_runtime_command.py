"""The `runtime` command as a user runs it: in a process of its own."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from help_pages import help_pages, seconds_of_help
from runtime_command import ENVIRONMENT, runtime_here, serving

from compress.common.cli import demo_model_path, tool_version

COMMANDS = ("serve", "generate", "chat", "batch", "bench", "memory", "prepare", "warm-up")
NOISE = 3.0  # how much slower than promised a busy machine may be


def test_help_reads_well_and_loads_nothing_heavy() -> None:
    pages = help_pages("runtime", ["", *COMMANDS])
    for command in COMMANDS:
        assert f"Usage: runtime {command}" in pages
    own = {page.split()[0]: page for page in pages.split("Usage: runtime ")[1:]}
    assert all("--activations" in own[command] for command in ("serve", "generate", "chat", "batch"))


def test_help_returns_at_once() -> None:
    assert seconds_of_help("runtime") < 0.5 * NOISE


def test_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert runtime_here("--version", cwd=tmp_path).stdout == f"compress-runtime {tool_version()}\n"


def test_port_in_use_is_one_line_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = "import sys; from runtime.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
        command = [sys.executable, "-c", code, "serve", "--port", str(port)]
        result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stdout == "False\n"  # before anything is loaded
    assert len(result.stderr.splitlines()) == 1
    assert re.match(rf"error: port {port} on 127.0.0.1 is already in use\. .* --port \d+", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["serve", "nowhere"], 1, "model folder nowhere does not exist"),
        (["serve", "packed/"], 1, "Create it with compress quantize"),
        (["generate", ".", "--prompt", "x"], 1, r"config\.json"),
        (["generate", "nowhere", "--prompt", "x"], 1, "model folder nowhere does not exist"),
        (["serve", "--host", "192.0.2.1"], 1, "not an address of this machine"),
        (["serve", "--port", "70000"], 1, r"--port.*70000"),
        (["serve", "--port", "-1"], 1, r"--port.*-1"),
        (["serve", "--api-key", ""], 1, "--api-key"),
        (["serve", "--kv-memory", "lots"], 1, "is not a size"),
        (["serve", "--dtype", "int3"], 1, "int3"),
        (["serve", "--activations", "4bit"], 1, "4bit"),
        (["generate", "--prompt", "x", "--linear-backend", "w4a8"], 1, "--activations 8bit"),
        (["serve", "--port", "0", "--jit-cache", "nowhere"], 1, "there is no file nowhere"),
        (["serve", "--data-parallel-size", "2", "--no-api-process"], 1, "--no-api-process"),
        (["warm-up", "--device", "cpu"], 1, "runs on NVIDIA GPUs"),
        (["warm-up", "--export", "nowhere/kernels"], 1, "folder nowhere does not exist"),
        (["generate", "--prompt", "x", "--top-p", "7"], 1, "top_p=7"),
        (["generate", "--prompt", "x", "--repetition-penalty", "3"], 1, "repetition_penalty=3"),
    ],
)
def test_bad_input_is_refused_before_loading(arguments: list[str], status: int, words: str, tmp_path: Path) -> None:
    result = runtime_here(*arguments, cwd=tmp_path)
    assert result.returncode == status
    assert re.search(words, result.stderr)
    assert "Traceback" not in result.stderr


def test_folder_without_a_checkpoint(tmp_path: Path) -> None:
    for command in (["serve", "--port", "0"], ["generate", "--prompt", "x"]):
        result = runtime_here(*command, str(tmp_path), cwd=tmp_path)
        assert result.returncode == 1
        assert re.fullmatch(r"error: .+\n", result.stderr.splitlines(keepends=True)[-1])
        assert "Traceback" not in result.stderr


def test_generate_uses_the_demo_model_and_says_so(tmp_path: Path) -> None:
    result = runtime_here("generate", "--prompt", "The castle", "--max-tokens", "8", "--temperature", "0", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "bundled demo model" in result.stderr
    assert result.stdout.strip()


def test_generate_reads_standard_input_and_writes_json(tmp_path: Path) -> None:
    options = ["--max-tokens", "12", "--seed", "3", "--stop", "\n\n", "--json"]
    first = runtime_here("generate", str(demo_model_path()), *options, cwd=tmp_path, stdin="The castle\n")
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout)
    assert answer["completion_tokens"] <= 12
    again = runtime_here("generate", str(demo_model_path()), *options, "--prompt", "The castle", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["text"] == answer["text"]


def test_generate_with_penalties(tmp_path: Path) -> None:
    options = ("--prompt", "The castle", "--max-tokens", "30", "--temperature", "0", "--json")
    texts = [
        json.loads(runtime_here("generate", *options, *penalty, cwd=tmp_path).stdout)["text"]
        for penalty in ((), ("--repetition-penalty", "1.9"), ("--presence-penalty", "2"))
    ]
    assert len(set(texts)) == 3


def test_generate_refuses_an_empty_prompt(tmp_path: Path) -> None:
    result = runtime_here("generate", cwd=tmp_path, stdin="")
    assert result.returncode == 1
    assert "--prompt TEXT" in result.stderr


def test_serve_announces_itself_and_its_curl_line_works(tmp_path: Path) -> None:
    with serving("--kv-offload", "64MiB", cwd=tmp_path) as (_, url, printed):
        for words in ("bundled demo model", "dense bfloat16", "context", "KV cache", "in host memory", "curl"):
            assert words in printed
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = json.loads(re.search(r"-d '(.*)'", printed)[1])
        assert body["model"] == model
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert f"page      {url}/" in printed
        assert "<title>" in httpx.get(f"{url}/").text
        figures = httpx.get(f"{url}/metrics").text
        assert float(re.search(r"^runtime_prefix_cache_queries_total (\S+)$", figures, re.MULTILINE)[1]) > 0
        linears = re.findall(r"^runtime_linears_total\{(.*)\} (\S+)$", figures, re.MULTILINE)
        for labels, count in linears:
            named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            assert f"{float(count):.0f} x {named['linear']}" in printed
            assert f"{named['form']}, kernel {named['kernel']} (" in printed
        assert len(linears) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_signal_lets_running_requests_end(tmp_path: Path, number: signal.Signals) -> None:
    with serving(cwd=tmp_path) as (process, url, _):
        body = {"model": "demo", "prompt": "The", "max_tokens": 200, "stream": True, "ignore_eos": True, "user": "Ann"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(120) == 0
        assert "user 'Ann'" in process.stderr.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.full
@pytest.mark.parametrize(("seconds", "signals"), [("1", 1), ("600", 2)])
def test_drain_has_a_time_limit(tmp_path: Path, seconds: str, signals: int) -> None:
    with serving("--drain-seconds", seconds, cwd=tmp_path) as (process, url, _):
        body = {"model": "demo", "prompt": "The", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.1)  # signals that are pending at once are one
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "aborted"
        assert done == "data: [DONE]"
        assert process.wait(120) == 0
        assert "Traceback" not in process.stderr.read()

"""`runtime serve` as a process: however it ends nothing of it stays, and no client can keep it waiting forever."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from runtime_command import serving, start
from safetensors.torch import save_file

DTYPE = ("--dtype", "float64")
MARGIN = 15.0  # of a busy machine
ENDLESS = {"model": "demo", "prompt": "The", "max_tokens": 300, "stream": True, "ignore_eos": True}


def living_members(session: int) -> dict[int, str]:
    """Command lines of all processes of a session that still run, by their ids."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own_session = status.read_text().rpartition(")")[2].split()[:4]
            if int(own_session) == session and state != "Z":
                found[int(status.parent.name)] = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.full
def test_sigkill_leaves_no_process_and_frees_the_port(tmp_path: Path) -> None:
    with serving("--drain-seconds", "60", cwd=tmp_path) as (process, url, _):
        assert [line for line in living_members(process.pid).values() if "serve" in line]
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.kill()
            start = time.monotonic()
            with pytest.raises(httpx.TransportError):
                list(lines)
            assert time.monotonic() - start < MARGIN  # the client learns of it at once
        process.wait(MARGIN)
        until_gone(process.pid)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        port = httpx.URL(url).port
    with serving(cwd=tmp_path, port=port) as (_, again, _):
        assert again == url
        assert httpx.get(f"{again}/health").status_code == 200


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of a server's engines."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_engine(path, process.pid)]


def engine_of(process: subprocess.Popen[str]) -> int:
    """The engine's process of a server."""
    (found,) = engines_of(process)
    return found


def is_engine(folder: Path, server: int) -> bool:
    try:
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        return int(parent) == server and b"served_engine" in (folder / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def until_gone(session: int) -> None:
    end = time.monotonic() + MARGIN
    while left := living_members(session):
        assert time.monotonic() < end, left
        time.sleep(0.05)


@pytest.mark.full
def test_answers_do_not_depend_on_processes_of_engines(tmp_path: Path) -> None:
    """Token by token, whole and streamed, with every kind of event; and a client that leaves frees its request."""
    common = {"model": "demo", "max_tokens": 24, "temperature": 0.8, "seed": 3}
    talk = {"messages": [{"role": "user", "content": "Tell a story"}]}
    requests = [
        ("/v1/completions", {"prompt": "The river", "n": 2, "logprobs": 2}),
        ("/v1/completions", {"prompt": "The river", "stop": [" a", "e "], "max_tokens": 200}),
        ("/v1/completions", {"prompt": "The river", "guided_regex": "(ab|cd)+!"}),
        ("/v1/completions", {"prompt": "The river", "echo": True, "prompt_logprobs": 1, "stream": False}),
        ("/v1/chat/completions", talk | {"logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", talk | {"response_format": {"type": "json_object"}}),
    ]
    found = []
    for options in (["--api-process"], ["--no-api-process"], ["--data-parallel-size", "2"]):
        with (
            serving(*options, "--dtype", "float64", cwd=tmp_path) as (process, url, _),
            httpx.Client(base_url=url) as api,
        ):
            answers = []
            for path, body in requests:
                for stream in {False, body.get("stream", True)}:
                    response = api.post(path, json=common | body | {"stream": stream}, timeout=60)
                    assert response.status_code == 200, response.text
                    answers.append(without_ids(response.text))
            found.append(answers)
            with api.stream("POST", "/v1/completions", json=ENDLESS | {"max_tokens": 1900}) as response:
                lines = response.iter_lines()  # which closes the connection when it is collected
                next(lines)
                assert api.get("/health").json()["running"] == 1
            end = time.monotonic() + MARGIN
            while api.get("/health").json()["running"]:
                assert time.monotonic() < end, "it goes on for a client that left"
            metrics = api.get("/metrics").text
            assert set(re.findall(r"^runtime_kv_cache_usage_perc(?:{.*})? (.*)", metrics, re.MULTILINE)) == {"0.0"}
            assert ("engine_process_resident_memory_bytes" in metrics) == (options != ["--no-api-process"])
            assert maps_torch(process.pid) == (options == ["--no-api-process"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(MARGIN) == 0
        until_gone(process.pid)
    assert found[0] == found[1] == found[2]


def without_ids(text: str) -> str:
    return re.sub(r'"(id|created)":("[^"]*"|\d+)', "", text)


def test_the_end_of_the_engine_ends_the_server(tmp_path: Path) -> None:
    """Requests get an error, whole and streamed, and the command fails."""
    with serving("--drain-seconds", "60", cwd=tmp_path) as (process, url, _), ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=ENDLESS | {"stream": False, "max_tokens": 2000})
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"max_tokens": 2000}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine_of(process), signal.SIGKILL)
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "generation_failed"
        assert done == "data: [DONE]"
        assert whole.result().status_code == 500
        assert process.wait(MARGIN) == 1
        log = process.stderr.read()
        assert log.splitlines()[-1].startswith("error: ")
        assert "signal 9" in log.splitlines()[-1]
        assert "Traceback" not in log
    until_gone(process.pid)


@pytest.mark.full
def test_an_engine_that_ends_while_it_loads_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")  # so that its load never ends
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    process = start("serve", "model", "--port", "0", cwd=tmp_path)
    try:
        end = time.monotonic() + 60
        while not engines_of(process):
            assert time.monotonic() < end
        os.kill(engine_of(process), signal.SIGKILL)
        assert process.wait(60) == 1
        assert "signal 9" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def closed_after(address: tuple[str, int], *parts: bytes) -> float:
    """Seconds until the server closes a connection that got some bytes now and then nothing more."""
    with socket.create_connection(address, timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        start = time.monotonic()
        with suppress(ConnectionResetError):
            while connection.recv(65536):
                start = time.monotonic()
        return time.monotonic() - start


@pytest.mark.full
def test_clients_that_dawdle_and_foreign_names_are_refused(tmp_path: Path) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving("--client-timeout", "1", cwd=tmp_path) as (_, url, _):
        address = (httpx.URL(url).host, httpx.URL(url).port)
        for parts in ([], [whole[:20]], [whole + whole[:20]], [whole, whole[:-2]]):
            assert 0.5 < closed_after(address, *parts) < 1 + MARGIN
        with httpx.Client(base_url=url) as client:
            assert [client.get("/health").status_code for _ in range(3)] == [200] * 3  # on one connection
            assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403
            assert client.get("/health", headers={"Origin": "http://evil.example"}).status_code == 403


def test_sigterm_refuses_new_requests_and_lets_streams_end(tmp_path: Path) -> None:
    with serving("--drain-seconds", "60", cwd=tmp_path) as (process, url, _):
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + MARGIN
            while (health := httpx.get(f"{url}/health")).status_code == 200:
                assert time.monotonic() < end, "it still takes requests"
            assert health.json()["status"] == "draining"
            assert process.poll() is None
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(120) == 0
        assert not living_members(process.pid)
        assert "Traceback" not in process.stderr.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.full
def test_settings_of_a_file_with_keys_and_encryption(tmp_path: Path) -> None:
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*words.split(), *files], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "keys.yaml").write_text("- {name: ann, key: first, requests_per_minute: 1}")
    settings = {"ssl-certfile": "cert.pem", "ssl-keyfile": "key.pem", "api-keys": "keys.yaml", "log-level": "debug"}
    (tmp_path / "serve.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    body = ENDLESS | {"max_tokens": 2, "stream": False}
    with serving("--config", "serve.yaml", "--log-level", "info", cwd=tmp_path) as (process, url, printed):
        assert f"page      {url}/" in printed
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=tmp_path / "cert.pem")) as client:
            ann = {"Authorization": "Bearer first"}
            statuses = [client.post("/v1/completions", json=body, headers=ann).status_code for _ in range(2)]
            assert statuses == [200, 429]
            (tmp_path / "keys.yaml").write_text("- {name: ann, key: second}")
            process.send_signal(signal.SIGHUP)
            end = time.monotonic() + MARGIN
            while client.get("/v1/models", headers=ann).status_code == 200:
                assert time.monotonic() < end, "the first key is still valid"
            ann = {"Authorization": "Bearer second"}
            assert client.post("/v1/completions", json=body, headers=ann).status_code == 200
            assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        log = process.stderr.read()
    assert "chmod 600 keys.yaml" in log
    assert log.count(" INFO request ") >= 4
    assert " ann POST /v1/completions 429 " in log
    assert "/health" not in log
    assert not [key for key in ("first", "second") if key in log]


@pytest.mark.full
def test_ctrl_c_twice_ends_everything_at_once(tmp_path: Path) -> None:
    """Also while long bodies are read in a process of their own, which the terminal interrupts as well."""
    long = {"model": "demo", "prompt": "word " * 500_000}
    with serving("--drain-seconds", "600", cwd=tmp_path) as (process, url, _), ThreadPoolExecutor(2) as pool:
        tokenized = pool.submit(httpx.post, f"{url}/tokenize", json=long, timeout=60)
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"max_tokens": 1900}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.2)  # signals that are pending at once are one
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "aborted"
        assert done == "data: [DONE]"
        assert tokenized.result().status_code == 503
        assert process.wait(60) == 0
        assert not living_members(process.pid)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.full
@pytest.mark.parametrize("is_busy", [True, False])
@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_a_rank_that_dies_ends_requests_and_server(tmp_path: Path, option: str, is_busy: bool) -> None:
    with serving(option, "2", cwd=tmp_path) as (process, url, _), ThreadPoolExecutor(1) as pool:
        body = {**ENDLESS, "max_tokens": 1500, "stream": False}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) if is_busy else None
        time.sleep(1.0)
        (rank,) = [pid for pid, line in living_members(process.pid).items() if "runtime.ranks" in line]
        os.kill(rank, signal.SIGKILL)
        assert process.wait(MARGIN) == 1
        until_gone(process.pid)
        if answer is not None:
            assert answer.result().status_code == 500


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_their_server(tmp_path: Path, number: signal.Signals) -> None:
    with serving("--tensor-parallel-size", "2", cwd=tmp_path) as (process, _, _):
        process.send_signal(number)
        process.wait(MARGIN)
        until_gone(process.pid)


def outcome(url: str, body: dict[str, object]) -> tuple[int, str]:
    """Status of an answer, and the code of its error; of a stream, that of its last event but one."""
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    text = response.text
    if body["stream"]:
        *_, text, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert done == "[DONE]"
    return response.status_code, json.loads(text)["error"]["code"]


def num_begun(url: str) -> int:
    """Requests of all engines that have a token."""
    counts = re.findall(r"^runtime_time_to_first_token_seconds_count{.*} (.*)", httpx.get(f"{url}/metrics").text, re.M)
    return sum(int(float(count)) for count in counts)


@pytest.mark.full
def test_an_engine_that_dies_ends_all_requests_and_the_server(tmp_path: Path) -> None:
    """Those of the other engine, too, long before the time to drain is over."""
    bodies = [ENDLESS | {"prompt": [number] * 20, "max_tokens": 2000, "stream": number % 4 > 1} for number in range(8)]
    options = ("--data-parallel-size", "2", "--drain-seconds", "600", *DTYPE)
    with serving(*options, cwd=tmp_path) as (process, url, printed), ThreadPoolExecutor(8) as pool:
        assert "engines   2" in printed
        first, _ = engines_of(process)
        asked = [pool.submit(outcome, url, body) for body in bodies]
        end = time.monotonic() + 60
        while num_begun(url) < len(bodies):
            assert time.monotonic() < end
        killed = time.monotonic()
        os.kill(first, signal.SIGKILL)
        found = [each.result() for each in asked]
        assert process.wait(MARGIN) == 1
        assert time.monotonic() - killed < 2 * MARGIN
        assert Counter(code for _, code in found) == {"aborted": 4, "generation_failed": 4}
        assert Counter(status == 200 for status, _ in found) == {True: 4, False: 4}  # streams, and whole answers
        log = process.stderr.read()
        assert "signal 9" in log.splitlines()[-1]
        assert "Traceback" not in log
    until_gone(process.pid)


@pytest.mark.full
def test_engines_share_requests_threads_and_a_drain(tmp_path: Path) -> None:
    body = ENDLESS | {"max_tokens": 100}
    with serving("--data-parallel-size", "2", cwd=tmp_path) as (process, url, _), ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(4)]
        metrics = httpx.get(f"{url}/metrics").text
        for engine, pid in enumerate(engines_of(process)):
            assert f'engine_process_resident_memory_bytes{{engine="{engine}"}}' in metrics
            assert maps_torch(pid)
        assert not maps_torch(process.pid)
        process.send_signal(signal.SIGTERM)
        assert all(each.result().text.endswith("data: [DONE]\n\n") for each in asked)
        assert process.wait(MARGIN) == 0
    until_gone(process.pid)

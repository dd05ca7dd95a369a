"""`runtime serve` as a process: however it ends nothing of it stays, and no client can keep it waiting forever."""

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from runtime_command import serving

MARGIN = 15.0  # of a busy machine
ENDLESS = {"model": "demo", "prompt": "The", "max_tokens": 300, "stream": True, "ignore_eos": True}


def living_members(session: int) -> list[str]:
    """Command lines of all processes of a session that still run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own_session = status.read_text().rpartition(")")[2].split()[:4]
            if int(own_session) == session and state != "Z":
                found.append((status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.full
def test_sigkill_leaves_no_process_and_frees_the_port(tmp_path: Path) -> None:
    with serving("--drain-seconds", "60", cwd=tmp_path) as (process, url, _):
        assert [line for line in living_members(process.pid) if "serve" in line]
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.kill()
            start = time.monotonic()
            with pytest.raises(httpx.TransportError):
                list(lines)
            assert time.monotonic() - start < MARGIN  # the client learns of it at once
        process.wait(MARGIN)
        end = time.monotonic() + MARGIN
        while left := living_members(process.pid):
            assert time.monotonic() < end, left
            time.sleep(0.05)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        port = httpx.URL(url).port
    with serving(cwd=tmp_path, port=port) as (_, again, _):
        assert again == url
        assert httpx.get(f"{again}/health").status_code == 200


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
        assert living_members(process.pid) == []
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
        assert living_members(process.pid) == []
        assert "Traceback" not in process.stderr.read()

"""A server whose model loads: what it answers, and that nothing is lost when the loaded one takes over."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from threading import Timer

import httpx
import pytest
import torch
from pydantic import TypeAdapter
from rich.console import Console
from runtime_command import start
from safetensors.torch import save_file

from runtime.cli.start_display import showing
from runtime.core.progress import Stage, StartProgress
from runtime.server.response_models import HealthResponse
from runtime.server.starting import answering

HEAD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_the_progress_and_what_it_took() -> None:
    clock = Clock()
    progress = StartProgress(clock)
    clock.now += 2
    progress(Stage.WEIGHTS, 0, 3)
    clock.now += 0.5
    progress(Stage.WEIGHTS, 1, 3)
    assert str(progress.position) == "reading weights, 1 of 3"
    clock.now += 1
    assert progress.elapsed == 3.5
    assert progress.summary() == "3.5 s: importing libraries 2.0 s, reading weights 1.5 s"


def test_a_terminal_shows_the_progress_and_a_file_nothing() -> None:
    for is_terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=is_terminal, width=60)
        progress = StartProgress()
        with showing(progress, console):
            progress(Stage.WEIGHTS, 12, 33)
        assert (str(progress.position) in console.file.getvalue()) == is_terminal


def test_health_tells_the_progress_and_other_routes_when_to_come_back(listener: socket.socket) -> None:
    progress = StartProgress()
    progress(Stage.WEIGHTS, 12, 33)
    host, port = listener.getsockname()
    with answering(listener, progress, 5, ["127.0.0.1"]), httpx.Client(base_url=f"http://{host}:{port}") as client:
        health = client.get("/health")
        assert health.status_code == 503
        found = TypeAdapter(HealthResponse).validate_python(health.json())
        assert found["status"] == "starting"
        assert found["progress"] | {"seconds": 0} == {"stage": Stage.WEIGHTS, "done": 12, "total": 33, "seconds": 0}
        assert client.head("/health").status_code == 503
        refused = client.post("/v1/completions", content=b"x" * 2**20)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "starting"
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403
        progress(Stage.STEPS, 1, 2)
        assert client.get("/health").json()["progress"]["stage"] == Stage.STEPS


def test_who_comes_at_the_end_is_answered_and_who_comes_later_waits(listener: socket.socket) -> None:
    with answering(listener, StartProgress(), 5):
        early = socket.create_connection(listener.getsockname(), timeout=5)
        early.sendall(HEAD)
        # Connections are accepted in their order, so the first one is when this one has its answer.
        assert httpx.get("http://{}:{}/health".format(*listener.getsockname())).status_code == 503
        rest = Timer(0.3, early.sendall, (b"\r\n",))
        rest.start()
    with early:
        assert early.recv(2**16).startswith(b"HTTP/1.1 503")
    with socket.create_connection(listener.getsockname(), timeout=5) as late:
        late.sendall(HEAD)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(2**16) == HEAD


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """The model's folder has a pipe in place of a file, so that its load never ends."""
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "model" / "model.safetensors")  # which is looked for before
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start("serve", "model", "--port", str(port), cwd=tmp_path)
    try:
        url, end = f"http://127.0.0.1:{port}/health", time.monotonic() + 60
        while True:
            try:
                assert httpx.get(url, timeout=30).json()["status"] == "starting"
                break
            except httpx.ConnectError:
                assert time.monotonic() < end, "it does not listen"
        process.send_signal(number)
        assert process.wait(60) == (-signal.SIGTERM if number == signal.SIGTERM else 130)
    finally:
        process.kill()
        process.communicate()

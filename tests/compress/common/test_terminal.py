"""Output of a command that refuses, is interrupted, or succeeds."""

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import typer

from compress.common import cli
from compress.common.cli import let_threads_sleep, parse_size, run_cli
from compress.common.errors import CheckpointError


def exit_status(monkeypatch, *arguments: str) -> int:
    app = typer.Typer()

    @app.command()
    def main(outcome: str) -> None:
        if outcome == "refuse":
            raise CheckpointError("the shard\nis truncated: 10 of 20 bytes", "Copy it again")
        if outcome == "interrupt":
            raise KeyboardInterrupt
        if outcome == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if outcome == "denied":
            raise PermissionError(errno.EACCES, "Permission denied", "/out")
        if outcome == "folder":
            raise IsADirectoryError(errno.EISDIR, "Is a directory", "/out")
        if outcome == "memory":
            raise MemoryError
        if outcome == "threads":
            raise RuntimeError("can't start new thread")
        if outcome == "map":
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        if outcome == "three":
            raise typer.Exit(3)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["tool", *arguments])
    with pytest.raises(SystemExit) as stop:
        run_cli(app)
    return int(stop.value.code or 0)


def test_refusal_is_one_line(monkeypatch, capsys):
    assert exit_status(monkeypatch, "refuse") == 1
    assert capsys.readouterr().err == "error: the shard is truncated: 10 of 20 bytes. Copy it again.\n"


def test_system_failures_are_one_line(monkeypatch, capsys):
    assert exit_status(monkeypatch, "full") == 1
    assert exit_status(monkeypatch, "denied") == 1
    assert exit_status(monkeypatch, "folder") == 1
    full, denied, folder = capsys.readouterr().err.splitlines()
    assert full == "error: No space left on device: in this command. Free space, or write to another disk."
    assert denied == "error: Permission denied: /out. Change its permissions, or name another path."
    assert folder == "error: Is a directory: /out. Name another path."


def test_interrupt_is_130(monkeypatch):
    assert exit_status(monkeypatch, "interrupt") == 130


SWALLOWING = """
import signal, time, typer
from compress.common.cli import run_cli

class Closed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)

def main():
    for _ in range(3):
        closed = Closed()
        del closed
    time.sleep(20)

app = typer.Typer()
app.command()(main)
run_cli(app)
"""
HEED = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it


def test_an_interrupt_within_a_destructor_is_not_lost():
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SWALLOWING], preexec_fn=HEED, capture_output=True, timeout=60)
    assert ended.returncode == 130
    assert time.monotonic() - begin < 10
    assert b"Traceback" not in ended.stderr


def test_an_interrupt_within_the_report_of_a_lost_one_comes_again(monkeypatch):
    frames = []
    monkeypatch.setattr(cli, "_send_again", lambda: frames.append(sys._getframe(1)))
    lost = SimpleNamespace(exc_type=KeyboardInterrupt)
    cli.report_unraisable(lost)
    cli.interrupt(signal.SIGINT, frames[0])
    assert len(frames) == 2
    with pytest.raises(KeyboardInterrupt):
        cli.interrupt(signal.SIGINT, sys._getframe())


@pytest.mark.full
def test_an_interrupt_at_any_moment_of_the_start_ends_a_command(tmp_path):
    """Those before the command runs end the process by the signal, which shells report as 130, too."""
    command = [sys.executable, "-m", "runtime.cli", "generate", "demo", "--prompt", "a", "--max-tokens", "1000"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for tenths in range(3, 33):
        process = subprocess.Popen(command, preexec_fn=HEED, cwd=tmp_path, **quiet)
        time.sleep(tenths / 10)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) in (130, -signal.SIGINT), tenths


def test_other_statuses_pass(monkeypatch):
    assert exit_status(monkeypatch, "fine") == 0
    assert exit_status(monkeypatch, "three") == 3
    assert exit_status(monkeypatch) == 1


def test_worker_threads_sleep_unless_the_user_wants_otherwise(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    let_threads_sleep()
    assert os.environ == {"OMP_WAIT_POLICY": "passive"}
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "active"})
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_sizes_in_every_unit():
    assert parse_size("10TiB") == 10 * 2**40
    assert parse_size("1.5 tb") == 1_500_000_000_000
    assert parse_size("4GiB") == 2**32
    assert parse_size("1000") == parse_size("1000b") == 1000
    for text in ("", "TiB", "1PiB", "-1GiB", "9" * 400):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)


@pytest.mark.parametrize("outcome", ["memory", "threads", "map"])
def test_shortages_are_one_line(monkeypatch, capsys, outcome):
    assert exit_status(monkeypatch, outcome) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "ulimit -v" in line

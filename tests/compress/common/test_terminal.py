"""Output of a command that refuses, is interrupted, or succeeds."""

import errno
import os
import sys

import pytest
import typer

from compress.common.cli import let_threads_sleep, run_cli
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
    assert full == "error: No space left on device: while writing. Free space, or write to another disk."
    assert denied == "error: Permission denied: /out. Change its permissions, or name another path."
    assert folder == "error: Is a directory: /out. Name another path."


def test_interrupt_is_130(monkeypatch):
    assert exit_status(monkeypatch, "interrupt") == 130


def test_other_statuses_pass(monkeypatch):
    assert exit_status(monkeypatch, "fine") == 0
    assert exit_status(monkeypatch, "three") == 3
    assert exit_status(monkeypatch) == 2


def test_worker_threads_sleep_unless_the_user_wants_otherwise(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    let_threads_sleep()
    assert os.environ == {"OMP_WAIT_POLICY": "passive"}
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "active"})
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "active"

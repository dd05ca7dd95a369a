"""`runtime chat` with lines from a pipe, and on a terminal of its own."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runtime_command import COMMAND, ENVIRONMENT, HEED_INTERRUPTS, runtime, runtime_here, start

from compress.common.cli import demo_model_path

pty = pytest.importorskip("pty")


def test_lines_of_a_pipe_are_turns(tmp_path: Path) -> None:
    lines = "Hello\n/system Be brief.\n/foo\n\nWho are you?\n/save chat.json\n/quit\nnever asked\n"
    result = runtime("chat", "--max-tokens", "12", "--temperature", "0", cwd=tmp_path, stdin=lines)
    assert result.returncode == 0, result.stderr
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert result.stdout == messages[2]["content"] + "\n" + messages[4]["content"] + "\n"
    assert "unknown command /foo" in result.stderr
    assert result.stderr.count("generated, the first after") == 2


def test_end_of_input_ends_it(tmp_path: Path) -> None:
    result = runtime_here("chat", "--max-tokens", "4", cwd=tmp_path, stdin="Hello")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_model_without_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("chat_template*"))
    result = runtime_here("chat", str(folder), cwd=tmp_path, stdin="Hello\n")
    assert result.returncode == 1
    assert "has no chat template. Use runtime generate" in result.stderr
    assert "model:" not in result.stderr  # before loading


@pytest.mark.full
def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    chat = start("chat", "--max-tokens", "1800", "--seed", "1", cwd=tmp_path)
    chat.stdin.write("Write the letters of the alphabet one thousand times, and never stop.\n/temperature 0\n")
    chat.stdin.flush()
    assert chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    chat.stdin.write("/save c.json\n")
    output, errors = chat.communicate(timeout=120)
    assert chat.returncode == 0, errors
    assert "[stopped; " in errors or "tokens/s]" in errors  # the second when the answer was over already
    assert "temperature 0\n" in errors
    assert len(json.loads((tmp_path / "c.json").read_text())["messages"]) == 2
    assert output.endswith("\n")


@pytest.mark.full
def test_terminal_has_a_prompt_and_ctrl_c_drops_a_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    chat = subprocess.Popen(
        [*COMMAND, "chat", "--max-tokens", "5"],
        cwd=tmp_path,
        env=ENVIRONMENT | {"TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=HEED_INTERRUPTS,
    )
    os.close(theirs)
    try:
        read_until(ours, "> ")
        os.write(ours, b"half a li")
        read_until(ours, "half a li")
        for _ in range(100):  # between two reads of the terminal Python would notice the signal at the next key only
            chat.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 0.5)[0]:
                break
        read_until(ours, "/quit or Ctrl-D quits")
        os.write(ours, b"Hello\n")
        read_until(ours, "generated, the first after")
        os.write(ours, b"/quit\n")
        assert chat.wait(120) == 0
    finally:
        chat.kill()
        os.close(ours)


def read_until(terminal: int, words: str) -> str:
    seen, end = "", time.monotonic() + 120
    while words not in seen:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen

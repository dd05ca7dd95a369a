"""The `runtime` command in a process of its own, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "runtime.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def runtime(*arguments: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=120
    )


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Starts it, with pipes at all three ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, text=True, **pipes)


@contextmanager
def serving(*options: str, cwd: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server in a session, and so a process group, of its own: the process, its URL and what it printed."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", str(port), *options],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed = ""
        while "\ntry " not in printed:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            printed += line
        yield process, re.search(r"serving .* at (http://\S+)", printed)[1], printed
    finally:
        process.kill()
        process.communicate()

"""The `runtime` command: in a process of its own, as a user runs it, and in this one, where torch is loaded already."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest

from runtime.cli import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "runtime.cli"]
HEED_INTERRUPTS = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
"""For `preexec_fn`: a test run that was started in the background ignores SIGINT, and so would its children."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def runtime(*arguments: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=120
    )


def run_here(main: Callable[[], None], *arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command line `main` to its end in this process, which saves the seconds that loading torch takes."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as stdout,
        redirect_stderr(StringIO()) as stderr,
    ):
        patch.chdir(cwd)
        patch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
        patch.setattr(sys, "argv", [main.__module__.partition(".")[0], *arguments])
        patch.setattr(sys, "stdin", StringIO(stdin))
        with pytest.raises(SystemExit) as end:
            main()
    return subprocess.CompletedProcess(arguments, end.value.code or 0, stdout.getvalue(), stderr.getvalue())


runtime_here = partial(run_here, main)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Starts it, with pipes at all three ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, text=True, preexec_fn=HEED_INTERRUPTS, **pipes
    )


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
        preexec_fn=HEED_INTERRUPTS,
    )
    try:
        printed = ""
        while "\ntry " not in printed:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            printed += line
        yield process, re.search(r"serving .* at (https?://\S+)", printed)[1], printed
    finally:
        process.kill()
        process.communicate()

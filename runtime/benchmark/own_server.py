"""A server of our own for a benchmark, in a process of its own: the load generator takes no turn from it."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from compress.checkpoint.errors import ToolkitError

READY = re.compile(r"^serving .* at (http://\S+)")
BOX = " ╭─╮│╰╯"
"""Around refusals of wrong options."""
SECONDS_TO_STOP = 10
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux' prctl."""


@contextmanager
def own_server(model: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Runs `runtime serve MODEL` on a free port of this machine; gives its URL and stops it in the end.

    Args:
        options: more options of `runtime serve`.

    Raises:
        ToolkitError: the server did not start; its last words are in the message.
    """
    command = [sys.executable, "-m", "runtime.cli", "serve", str(model), "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, preexec_fn=_die_with_parent
        )
        try:
            yield _wait_until_ready(server, log)
        finally:
            _stop(server)


def _wait_until_ready(server: subprocess.Popen[str], log: IO[str]) -> str:
    for line in server.stdout or ():
        if match := READY.match(line):
            return match[1]
    server.wait()
    log.seek(0)
    lines = [line.strip(BOX) for line in log.read().splitlines() if line.strip(BOX)] or ["no message"]
    words = " ".join(lines[lines.index("Error") + 1 :]) if "Error" in lines else lines[-1].removeprefix("error: ")
    raise ToolkitError(f"the server did not start: {words}")


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.communicate(timeout=SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()


def _die_with_parent() -> None:
    """A load generator that is killed leaves no server behind (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)

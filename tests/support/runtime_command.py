"""The `runtime` command in a process of its own, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "runtime.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def runtime(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=120
    )


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Starts it, with pipes at all three ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *arguments], cwd=cwd, env=ENVIRONMENT, text=True, **pipes)

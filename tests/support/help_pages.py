"""Help pages of a command line, printed by a process of its own."""

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "numpy", "accelerate", "pydantic")
PRINT = """
import sys
from {name}.cli import app

for command in {commands}:
    try:
        app([command, "--help"] if command else ["--help"], prog_name="{name}")
    except SystemExit as end:
        assert not end.code
heavy = set({heavy}) & set(sys.modules)
assert not heavy, heavy
"""


def help_pages(name: str, commands: Sequence[str]) -> str:
    """Help of each command of `compress` or `runtime`; "" is that of the program. Fails if a heavy module is imported
    on the way."""
    code = PRINT.format(name=name, commands=tuple(commands), heavy=HEAVY)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def seconds_of_help(name: str) -> float:
    """Processor time: the clock on the wall also measures what else the machine does. Caches that others use cost some
    of it too, so the least of a few runs counts."""
    return min(_processor_seconds(name) for _ in range(3))


def _processor_seconds(name: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    help_pages(name, [""])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

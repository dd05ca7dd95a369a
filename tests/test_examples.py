"""The scripts in `examples/` run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = {
    "compress_and_evaluate.py OUT": r"KL 0\.0\d+, perplexity \d+",
    "recipe.py OUT": r"w8a16 g128 sym 2:4",
    "serve_and_call.py": r"\w+ \w+ \w+",
    "own_method.py quantize --method stochastic --noise-seed 1 --out OUT": r"compress eval --ppl",
    "own_family.py OUT": r"8 tokens: ",
}
"""Arguments, and a pattern of what is printed."""


def test_every_example_is_run() -> None:
    assert {command.split()[0] for command in COMMANDS} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_runs(command: str, tmp_path: Path) -> None:
    name, *arguments = command.replace("OUT", str(tmp_path / "out")).split()
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": "200"}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(COMMANDS[command], ran.stdout), ran.stdout

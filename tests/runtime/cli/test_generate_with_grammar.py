"""`runtime generate --json-schema` and `--regex`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import validate

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 50}},
    "required": ["n"],
    "additionalProperties": False,
}


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.cli", "generate", "--prompt", "The castle", *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def test_json_of_a_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    result = generate(tmp_path, "--json-schema", "schema.json")
    assert result.returncode == 0, result.stderr
    validate(json.loads(result.stdout), SCHEMA)


def test_text_of_a_regular_expression(tmp_path: Path) -> None:
    result = generate(tmp_path, "--regex", "[0-9]{3}-[ab]", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert re.fullmatch("[0-9]{3}-[ab]", answer["text"])
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--regex", "("), "unclosed group"),
        (("--regex", "a", "--json-schema", "schema.json"), "exclude each other"),
        (("--json-schema", "missing.json"), "missing.json cannot be read"),
        (("--json-schema", "broken.json"), "line 1 column 2"),
        (("--json-schema", "unsupported.json"), "uniqueItems"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "schema.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "unsupported.json").write_text('{"type": "array", "uniqueItems": true}')
    result = generate(tmp_path, *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert "Traceback" not in result.stderr

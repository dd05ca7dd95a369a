"""`runtime generate --json-schema` and `--regex`."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from jsonschema import validate
from runtime_command import runtime_here

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 50}},
    "required": ["n"],
    "additionalProperties": False,
}


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return runtime_here("generate", "--prompt", "The castle", *arguments, cwd=folder)


def test_json_of_a_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    result = generate(tmp_path, "--json-schema", "schema.json")
    assert result.returncode == 0, result.stderr
    validate(json.loads(result.stdout), SCHEMA)


def test_keywords_that_are_not_enforced_are_named(tmp_path: Path) -> None:
    items = {"type": "array", "items": {"type": "integer", "maximum": 3}, "maxItems": 3, "uniqueItems": True}
    (tmp_path / "schema.json").write_text(json.dumps(items))
    result = generate(tmp_path, "--json-schema", "schema.json")
    assert result.returncode == 0, result.stderr
    assert "schema.json: uniqueItems" in result.stderr


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
        (("--json-schema", "unsupported.json"), "dynamicRef"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "schema.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "unsupported.json").write_text('{"$dynamicRef": "#a"}')
    result = generate(tmp_path, *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert "Traceback" not in result.stderr

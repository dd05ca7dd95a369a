"""Lines of batch files: what is right comes through, what is wrong is named by number."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.common.errors import DataError
from runtime.cli.batch_file import Line, read_lines

BODY = {"model": "demo", "prompt": "x"}
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}


def read(tmp_path: Path, *lines: Any) -> list[Line | str]:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return list(read_lines(file, "demo"))


def test_good_lines_with_blank_ones_between(tmp_path: Path) -> None:
    chat = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo"}}
    found = read(tmp_path, GOOD, "", "  ", chat)
    assert found == [Line(1, "a", "/v1/completions", BODY), Line(4, "b", "/v1/chat/completions", {"model": "demo"})]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeff" + json.dumps(GOOD)) == [Line(1, "a", "/v1/completions", BODY)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "not a JSON object"),
        ({"custom_id": "b"}, "lacks method, url, body"),
        (GOOD | {"custom_id": "b", "extra": 1}, "unknown field 'extra'"),
        (GOOD | {"custom_id": 5}, "custom_id 5 is not a non-empty string"),
        (GOOD | {"custom_id": ""}, "is not a non-empty string"),
        (GOOD | {"custom_id": "b", "method": "GET"}, "method 'GET' is not POST"),
        (GOOD | {"custom_id": "b", "url": "/v1/models"}, "url '/v1/models' is none of"),
        (GOOD | {"custom_id": "b", "body": []}, "body is not a JSON object"),
        (GOOD | {"custom_id": "b", "body": BODY | {"stream": True}}, "stream=true"),
        (GOOD | {"custom_id": "b", "body": BODY | {"model": "gpt"}}, "model 'gpt' is not the loaded one, 'demo'"),
        (GOOD, "custom_id 'a' was in line 1 already"),
    ],
)
def test_wrong_lines_are_named_by_number(tmp_path: Path, line: Any, words: str) -> None:
    good, wrong = read(tmp_path, GOOD, line)
    assert isinstance(good, Line)
    assert isinstance(wrong, str)
    assert "in.jsonl:2: " in wrong
    assert words in wrong


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        list(read_lines(tmp_path / "nothing", "demo"))
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_lines(tmp_path / "latin", "demo"))

"""Result files: whatever byte a run was killed at, the next one keeps every whole line and repairs the last."""

import json
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from compress.common.errors import DataError
from runtime.cli.batch_file import ResultFile


def answer(status: int = 200, text: str = "hi") -> httpx.Response:
    return httpx.Response(status, headers={"x-request-id": "r1"}, content=json.dumps({"text": text}).encode())


def written(path: Path) -> bytes:
    with closing(ResultFile(path)) as results:
        results.write("a", answer())
        results.write("b", answer(400))
        results.write("c", answer(text="é\n"))
    return path.read_bytes()


def test_lines_have_the_published_shape(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in written(tmp_path / "out").splitlines()]
    assert [set(line) for line in lines] == [{"id", "custom_id", "response", "error"}] * 3
    assert lines[0]["response"] == {"status_code": 200, "request_id": "r1", "body": {"text": "hi"}}
    assert len({line["id"] for line in lines}) == 3


def test_any_cut_is_repaired(tmp_path: Path) -> None:
    file = tmp_path / "out"
    whole = written(file)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        with closing(ResultFile(file)) as results:
            kept = [end for end in ends if end <= cut]
            assert list(results.statuses.values()) == [200, 400, 200][: len(kept)]
            results.write("z", answer())
        content = file.read_bytes()
        assert content[: max(kept, default=0)] == whole[: max(kept, default=0)]
        found = [json.loads(line)["custom_id"] for line in content.splitlines()]
        assert found == [*["a", "b", "c"][: len(kept)], "z"]


@pytest.mark.parametrize(
    "content", ['{"custom_id": "a", "method": "POST"}\n', "notes\n", "notes", '{"custom_id": "a"}', "[]\n", "\n"]
)
def test_other_files_are_left_as_they_are(tmp_path: Path, content: str) -> None:
    file = tmp_path / "out"
    file.write_text(content)
    with pytest.raises(DataError, match="out:1"):
        ResultFile(file)
    assert file.read_text() == content

"""`runtime batch`: lines, results, answers as the server gives them, and no request lost or done twice."""

import asyncio
import json
import re
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from runtime_command import runtime, runtime_here, start

from compress.common.cli import demo_model_path, interrupt
from compress.common.errors import DataError
from runtime.bench.run import run_server
from runtime.cli.batch import run
from runtime.cli.batch_file import Batch, Line, Progress, ResultFile, read_lines

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
EXACT = ["--dtype", "float64", "--linear-backend", "reference"]  # no token depends on who else is in the batch


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    shared = {"model": "demo"} if url == EMBEDDINGS else {"model": "demo", "max_tokens": 8, "seed": 1}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": shared | body}


def write(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return lines


def read(path: Path) -> dict[str, dict[str, Any]]:
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {entry["custom_id"]: entry["response"] for entry in entries}
    assert len(by_id) == len(entries)
    return by_id


MIXED = [
    line("complete", prompt="The castle was"),
    line("several", prompt=["Once", "In 1943"], n=2, temperature=0.9),
    line("chat", CHAT, messages=[{"role": "user", "content": "Who built the castle?"}]),
    line("logprobs", prompt="The", logprobs=2),
    line("embed", EMBEDDINGS, input=["one", "two words"]),
    line("too long", prompt="The", max_tokens=100_000),
    line("wrong field", prompt="The", colour="blue"),
]
WHERE_ANSWERS_DIFFER = ("id", "created")


def test_answers_are_the_server_s(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", MIXED)
    result = runtime_here("batch", "in.jsonl", "out.jsonl", *EXACT, cwd=tmp_path)
    assert result.returncode == 1
    assert "2 of 7 " in result.stderr
    found = read(tmp_path / "out.jsonl")
    with run_server(demo_model_path(), EXACT) as server:
        for entry in MIXED:
            response = httpx.post(server.url + entry["url"], json=entry["body"], timeout=60)
            mine = found[entry["custom_id"]]
            assert mine["status_code"] == response.status_code, (entry["custom_id"], response.text)
            assert mine["request_id"]
            for name in response.json().keys() - set(WHERE_ANSWERS_DIFFER):
                assert rounded(mine["body"][name]) == rounded(response.json()[name]), entry["custom_id"]
    assert found["too long"]["body"]["error"]["param"] == "max_tokens"


def rounded(value: Any) -> Any:
    """Sums over another batch differ in the last digits of float64."""
    match value:
        case float():
            return round(value, 9)
        case list():
            return [rounded(item) for item in value]
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case _:
            return value


@pytest.mark.full
def test_a_killed_run_goes_on_without_losing_or_repeating(tmp_path: Path) -> None:
    lines = [line(f"r{i}", prompt=f"Number {i}", max_tokens=100, ignore_eos=True) for i in range(40)]
    write(tmp_path / "in.jsonl", lines)
    out = tmp_path / "out.jsonl"
    options = ["batch", "in.jsonl", "out.jsonl", "--max-num-seqs", "2"]
    for number in (signal.SIGKILL, signal.SIGINT):
        run, size = start(*options, cwd=tmp_path), out.stat().st_size if out.exists() else 0
        end = time.monotonic() + 120
        while not out.exists() or out.stat().st_size <= size:
            assert time.monotonic() < end
            time.sleep(0.02)
        run.send_signal(number)
        _, errors = run.communicate(timeout=120)
        assert run.returncode == (-9 if number == signal.SIGKILL else 130), errors
        assert "Traceback" not in errors
    assert "stopped" in errors
    with out.open("ab") as stream:
        stream.write(b'{"id":"batch_req_12')  # as a kill in the middle of a line leaves it
    before = read_whole_lines(out)
    assert 2 <= len(before) < 40
    result = runtime("batch", "in.jsonl", "out.jsonl", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"40 of 40 .*\({len(before)} .* 0 ", result.stderr)
    found = read(out)
    assert found.keys() == {entry["custom_id"] for entry in lines}
    assert out.read_bytes().startswith(b"".join(before))
    assert all(response["body"]["usage"]["completion_tokens"] == 100 for response in found.values())


def test_ctrl_c_cancels_requests_and_raises_nothing_in_them(tmp_path: Path) -> None:
    app, seen = FastAPI(), list[type[BaseException]]()

    @app.post(COMPLETIONS)
    async def complete() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(10)
        except BaseException as error:
            seen.append(type(error))
            raise

    write(tmp_path / "in.jsonl", [line(f"r{i}", prompt="x") for i in range(2)])
    before = signal.signal(signal.SIGINT, interrupt)  # as `main` does
    with closing(ResultFile(tmp_path / "out.jsonl")) as file, pytest.raises(KeyboardInterrupt):
        run(app, Batch(tmp_path / "in.jsonl", "demo", file, file, 1), Progress(2, 0))
    assert signal.signal(signal.SIGINT, before) is interrupt
    assert seen == [asyncio.CancelledError]


def read_whole_lines(path: Path) -> list[bytes]:
    return [text for text in path.read_bytes().splitlines(keepends=True) if text.endswith(b"\n")]


def test_failures_in_a_file_of_their_own_and_nothing_to_do_the_second_time(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("good", prompt="x"), line("bad", prompt="x", top_p=7)])
    for _ in range(2):
        result = runtime_here("batch", "in.jsonl", "out.jsonl", "--errors", "err.jsonl", cwd=tmp_path)
        assert result.returncode == 1
        assert re.search(r"1 of 2 .* err\.jsonl", result.stderr)
        assert read(tmp_path / "out.jsonl").keys() == {"good"}
        assert read(tmp_path / "err.jsonl")["bad"]["body"]["error"]["param"] == "top_p"
    assert "model:" not in result.stderr  # nothing was loaded


def test_wrong_files_are_refused_before_loading(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a"), line("a"), line("b", "/v1/models")])
    result = runtime_here("batch", "in.jsonl", "out.jsonl", cwd=tmp_path)
    assert result.returncode == 1
    assert "in.jsonl:2: custom_id 'a' " in result.stderr
    assert "in.jsonl:3: url" in result.stderr
    assert "2 of 3 " in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl", "out.jsonl"], r"none\.jsonl"),
        (["empty.jsonl", "out.jsonl"], r"empty\.jsonl"),
        (["in.jsonl", "in.jsonl"], r"in\.jsonl:1"),
        (["in.jsonl", "out.jsonl", "--served-model-name", "gpt"], r"'demo'.*'gpt'"),
        (["in.jsonl", "no/folder/out.jsonl"], "no/folder"),
        (["in.jsonl", "."], r"\. is a folder"),
    ],
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a", prompt="x")])
    (tmp_path / "empty.jsonl").write_text("\n")
    result = runtime_here("batch", *arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert re.search(words, result.stderr)
    assert "Traceback" not in result.stderr


BODY = {"model": "demo", "prompt": "x"}
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}


def parsed(tmp_path: Path, *lines: Any) -> list[Line | str]:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return list(read_lines(file, "demo"))


def test_good_lines_with_blank_ones_between(tmp_path: Path) -> None:
    chat = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo"}}
    found = parsed(tmp_path, GOOD, "", "  ", chat)
    assert found == [Line(1, "a", "/v1/completions", BODY), Line(4, "b", "/v1/chat/completions", {"model": "demo"})]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    assert parsed(tmp_path, "\ufeff" + json.dumps(GOOD)) == [Line(1, "a", "/v1/completions", BODY)]


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
        (GOOD, "custom_id 'a' is used in line 1 already"),
    ],
)
def test_wrong_lines_are_named_by_number(tmp_path: Path, line: Any, words: str) -> None:
    good, wrong = parsed(tmp_path, GOOD, line)
    assert isinstance(good, Line)
    assert isinstance(wrong, str)
    assert "in.jsonl:2: " in wrong
    assert words in wrong


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.*JSON"):
        list(read_lines(tmp_path / "nothing", "demo"))
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    with pytest.raises(DataError, match=r"latin .*UTF-8"):
        list(read_lines(tmp_path / "latin", "demo"))


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

"""`compress doctor` as it is typed: a page for people, JSON for machines, and the status."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from folders import change_tensors, private_copy

from compress.common.cli import draft_model_path


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    from compress.cli import main

    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compress", "doctor", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return call


def test_a_clean_model(doctor: Callable[..., tuple[int, str, str]]) -> None:
    code, page, errors = doctor("demo")
    assert code == 0
    assert "container: dense" in page
    assert page.splitlines()[-1].endswith("no findings")
    assert not errors


def test_findings_of_one_kind_are_cut_short(tmp_path: Path, doctor: Callable[..., tuple[int, str, str]]) -> None:
    folder = private_copy(draft_model_path(), tmp_path / "model")
    change_tensors(folder, lambda tensors: [tensor.fill_(float("nan")) for tensor in tensors.values()])
    code, page, errors = doctor(folder)
    assert code == 1
    assert page.count("\n│ error") == 3
    assert "more of this kind" in " ".join(page.replace("│", " ").split())
    assert "errors" in errors
    code, text, _ = doctor(folder, "--json")
    found = json.loads(text)
    assert code == 1
    assert not found["ok"]
    assert found["errors"] == sum(each["severity"] == "error" for each in found["findings"]) > 3
    assert set(found["findings"][0]) == {"check", "kind", "severity", "where", "problem", "remedy"}


def test_warnings_do_not_fail(tmp_path: Path, doctor: Callable[..., tuple[int, str, str]]) -> None:
    folder = private_copy(draft_model_path(), tmp_path / "model")
    (folder / "left.tmp").write_text("x")
    code, page, errors = doctor(folder)
    assert code == 0
    assert "0 errors, 1 warnings" in page
    assert not errors


def test_no_such_folder(tmp_path: Path, doctor: Callable[..., tuple[int, str, str]]) -> None:
    code, page, errors = doctor(tmp_path / "nothing")
    assert (code, page) == (1, "")
    assert errors.startswith("error: model folder")
    assert errors.count("\n") == 1

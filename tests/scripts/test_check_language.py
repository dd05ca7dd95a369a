"""`scripts/check_language.py`: forbidden phrases are found where they are, and nowhere else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def test_planted_phrases_are_found_with_file_and_line(tmp_path: Path) -> None:
    import check_language

    (tmp_path / "planted.py").write_text(
        '"""Of the codes."""\nx = 1  # Nobody wants\n\n# the tokens that were\n# said\n'
    )
    (tmp_path / "clean.py").write_text('"""Counts of codes."""\nhow_many = "so  manyfold"  # what is wanted\n')
    found = check_language.find_all(tmp_path, [Path("planted.py"), Path("clean.py"), Path("deleted.py")])
    assert [(str(each.file), each.line, each.phrase) for each in found] == [
        ("planted.py", 1, '"""Of'),
        ("planted.py", 2, "Nobody"),
        ("planted.py", 4, "were said"),
    ]
    assert str(found[1]).startswith("planted.py:2: Nobody: ")


def test_every_phrase_is_found(tmp_path: Path) -> None:
    import check_language

    for phrase, reason in check_language.PHRASES.items():
        found = list(check_language.find(Path("page.md"), f"A line.\nIt has {phrase} here.\n"))
        assert (2, phrase, reason) in [(each.line, each.phrase, each.reason) for each in found]


def test_the_status_tells_whether_there_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    import check_language

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in ("docs/page.md", "calibration/data/text.md", "picture.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("so many words\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(check_language, "REPOSITORY", tmp_path)
    assert check_language.main([]) == 1
    assert capsys.readouterr().out.splitlines()[0].startswith("docs/page.md:1: so many: ")
    assert check_language.main(["--count"]) == 1
    assert capsys.readouterr().out.splitlines()[0].split() == ["1", "docs"]
    (tmp_path / "docs/page.md").write_text("64 words\n")
    assert check_language.main([]) == 0
    assert check_language.main(["calibration"]) == 0

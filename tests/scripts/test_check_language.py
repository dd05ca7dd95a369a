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


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("It is no form, and they are\nno numbers.", ["is no", "are no"]),
        ("There is no form. It is no longer slow, is no faster than C, and there\nare no others.", []),
        ("A file beside it. Besides, `beside` and [it](page.md#beside) are code.", ["beside"]),
        ("One behind the other, behind it.", ["behind", "behind"]),
        ("Behind a reverse proxy; behind the gateway; a piece that lags behind.", []),
        ("Weights meet activations, and it meets others as they met.", ["meet", "meets", "met"]),
        ("It meets a target, meets all of the limits; the aim is met, another not met.", []),
        ("For those alone; `runtime` serves text alone.", ["those alone", "text alone"]),
        ("The weights alone take 5 GB, and a request runs alone.", []),
        ("```\nwhat is beside it\n```\nThe end.\n", []),
    ],
)
def test_odd_uses_are_found_in_prose_and_ordinary_ones_are_not(text: str, phrases: list[str]) -> None:
    import check_language

    assert [each.phrase for each in check_language.find(Path("page.md"), text)] == phrases


def test_odd_uses_are_found_in_comments_docstrings_and_messages() -> None:
    import check_language

    docstring = '"""A file\n    beside it.\n\n    beside: a field.\n"""\n'
    text = docstring + 'beside = "beside"  # behind\nsay(f"{beside} is no form")\n'
    found = check_language.find(Path("compress/page.py"), text)
    assert [(each.line, each.phrase) for each in found] == [(7, "is no"), (2, "beside"), (6, "behind")]
    in_tests = check_language.find(Path("tests/test_page.py"), text)
    assert [(each.line, each.phrase) for each in in_tests] == [(2, "beside"), (6, "behind")]


def test_words_that_the_glossary_replaces_are_found() -> None:
    import check_language

    rows = "|---|---|---|\n| page | keys | `cache block`, room |\n\n| other | means | `text` |\n"
    ((pattern, reason),) = check_language.replaced_words(f"{check_language.GLOSSARY_TABLE}\n{rows}").items()
    assert pattern.findall("A cache block, Cache blocks, a room and text.") == ["cache block", "Cache blocks"]
    assert "page" in reason
    found = list(check_language.find(Path("page.md"), "The KV blocks of a\ndecoder\nlayer and a cached page.\n"))
    assert [(each.line, each.phrase) for each in found] == [(2, "decoder layer"), (1, "KV blocks")]


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

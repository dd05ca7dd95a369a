"""CONTRIBUTING.md shows code that exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```diff\n\+\+\+ b/(\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


def test_each_registry_has_an_example() -> None:
    folders = {Path(path).parts[:2] for path, _ in BLOCKS}
    assert folders == {
        ("compress", "methods"),
        ("compress", "stages"),
        ("compress", "checkpoint"),
        ("compress", "models"),
        ("runtime", "backends"),
    }


@pytest.mark.parametrize(("path", "diff"), BLOCKS, ids=[path for path, _ in BLOCKS])
def test_lines_of_an_example_stand_in_its_file(path: str, diff: str) -> None:
    """In the same order, perhaps with others between them."""
    lines = iter((ROOT / path).read_text().splitlines())
    missing = [line for line in diff.splitlines() if line != "+" and line[1:] not in lines]
    assert not missing


def sources(*words: str) -> set[str]:
    """Source files in which one of the words stands."""
    named = re.compile(rf"\b({'|'.join(words)})\b")
    files = (file for package in ("compress", "runtime") for file in (ROOT / package).rglob("*.py"))
    return {str(file.relative_to(ROOT)) for file in files if named.search(file.read_text())}


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (("ShortConv", "ConvLayer"), {"compress/models/families/lfm2.py", "runtime/model/mixers/causal_conv.py"}),
        (
            ("KimiDelta", "KimiDeltaLayer"),
            {"compress/models/families/kimi_linear.py", "runtime/model/mixers/kimi_delta.py"},
        ),
    ],
    ids=["lfm2", "kimi_linear"],
)
def test_a_mixer_is_named_in_its_files_only(words: tuple[str, ...], files: set[str]) -> None:
    assert sources(*words) == files
    assert all(file in (ROOT / "CONTRIBUTING.md").read_text() for file in files)


def test_decoder_and_loader_name_no_mixer() -> None:
    for name in ("decoder", "loader"):
        imported = re.findall(r"mixers\.(\w+) import", (ROOT / f"runtime/model/{name}.py").read_text())
        assert set(imported) <= {"registry"}

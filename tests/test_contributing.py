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

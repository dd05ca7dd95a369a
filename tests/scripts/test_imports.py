"""Imports inside of functions of scripts, which no linter follows, name what there is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS = ("compress", "runtime", "calibration", "benchmarking", "demo_training")


def imported_names(file: Path) -> Iterator[tuple[str, str]]:
    """Modules of the project and the names that a file takes from them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from ((node.module, alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OURS:
            return False
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("file", sorted(SCRIPTS.rglob("*.py")), ids=lambda file: file.stem)
def test_every_import_of_the_project_exists(file: Path) -> None:
    missing = [f"{module}.{name}" for module, name in imported_names(file) if not exists(module, name)]
    assert not missing

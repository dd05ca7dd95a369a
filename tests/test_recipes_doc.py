"""docs/recipes.md lists every stage and every key, and links of all documents lead somewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from compress.recipe_file import parse_work
from compress.stages.base import STAGES, TensorStage

ROOT = Path(__file__).parents[1]
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def rows(header: str) -> list[list[str]]:
    """Cells of the table that begins with a header, without its head."""
    table = RECIPES.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_every_stage_is_listed() -> None:
    assert {name for row in rows("stage") for name in named(row[0])} == set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_is_listed_with_its_default(stage: str) -> None:
    listed: dict[str, str] = {}
    for cell, defaults, _ in rows(f"key of `{stage}`"):
        names, parts = named(cell), defaults.split(", ")
        listed |= dict(zip(names, parts * len(names) if len(parts) == 1 else parts, strict=False))
    keys = STAGES[stage].written_keys()
    known = {name: each.default for name, _, each in keys if each.metadata["option"].typed is not None}
    assert listed.keys() == known.keys()
    for name, default in known.items():
        written = f"{default:g}" if isinstance(default, float) else str(default).lower()
        assert default is None or listed[name].partition(";")[0].strip("`") == written, name


def test_patterns_are_keys_of_stages_that_change_layers() -> None:
    patterns = {name for row in rows("key") for name in named(row[0])}
    assert patterns == {each.name for each in fields(TensorStage)}


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", RECIPES, re.DOTALL))
def test_recipes_are_valid(text: str) -> None:
    assert parse_work(text, "docs/recipes.md") is not None


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target

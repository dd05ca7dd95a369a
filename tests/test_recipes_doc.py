"""docs/recipes.md lists every stage and every key, and links of all documents lead somewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from compress.recipe_file import parse_work
from compress.stage_keys import stage_keys

ROOT = Path(__file__).parents[1]
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def first_cells(header: str) -> list[str]:
    """Names in the first column of the table that begins with a header."""
    table = RECIPES.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_every_stage_is_listed() -> None:
    assert set(first_cells("stage")) == set(stage_keys())


@pytest.mark.parametrize("stage", stage_keys())
def test_every_key_is_listed(stage: str) -> None:
    listed = first_cells(f"key of `{stage}`")
    assert sorted(listed) == sorted(each.name for each in fields(stage_keys()[stage]))


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

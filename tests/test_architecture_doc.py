"""Classes in the pictures of docs/architecture.md exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_classes_of_the_picture_of_a_request_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text.split("## The life of a request", 1)[1].split("```")[1]
    named = set(re.findall(r"\b[A-Z]+[a-z]+(?:[A-Z][a-z]+)*\b", picture)) - {"JSON"}
    sources = "\n".join(path.read_text() for path in (ROOT / "runtime").rglob("*.py"))
    assert len(named) > 15
    missing = {name for name in named if not re.search(rf"\bclass {name}\b|^{name}\b.*= ", sources, re.MULTILINE)}
    assert not missing

"""Figures as tables on the console, in Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, str]


def print_table(title: str, rows: Sequence[Row], console: Console) -> None:
    """Rows with the same keys, as a table; the first column is text, the others are figures."""
    table = Table(title=title)
    for position, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def markdown_table(rows: Sequence[Row]) -> str:
    names = list(rows[0])
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def print_with_markdown(title: str, rows: Sequence[Row], console: Console) -> None:
    """Rows as a table to read, and below it as one to paste."""
    print_table(title, rows, console)
    console.print(markdown_table(rows), markup=False)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def describe(facts: Mapping[str, Any]) -> str:
    """Facts on one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)

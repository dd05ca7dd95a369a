"""Figures as tables on the console, in Markdown, as JSON, and as rows that are written one by one."""

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


class Rows:
    """Figures that are printed, and appended to a file of JSON lines, as they are measured: a run may be cut off.

    Args:
        path: the file, which several processes may append to; None: there is none.
        about: entries of every row.
    """

    def __init__(self, path: Path | None, **about: Any) -> None:
        self.path, self.about = path, about

    def add(self, **row: Any) -> None:
        numbers = {name: float(f"{value:.5g}") for name, value in row.items() if isinstance(value, float)}
        content = self.about | row | numbers
        print(describe(content), flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(content) + "\n")

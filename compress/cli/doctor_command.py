"""`compress doctor`: findings about a checkpoint, each with its remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.locate import find_model
from compress.cli.options import AsJson
from compress.common.cli import progress_bar, wide_console
from compress.common.errors import CheckpointError

if TYPE_CHECKING:
    from rich.table import Table

    from compress.doctor.findings import Diagnosis, Finding

MOST_ALIKE = 3
"""Findings shown per kind; `--json` lists all."""


def doctor(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="Checkpoint folder or GGUF file, dense or packed, written by any tool."
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="DENSE", help="Dense source model to compare every matrix with."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Diagnose a checkpoint: list its defects, with a remedy for each.

    Checks files, config, shapes, weights, scales and codes, tokenizer and chat template; writes nothing. Exits with
    status 1 if there are errors; warnings do not change the status.
    """
    from rich.console import Console

    from compress.doctor.examine import examine

    checkpoint, source = find_model(path), find_model(against) if against else None
    with progress_bar(Console(stderr=True), "reading") as on_progress:
        found = examine(checkpoint, source, on_progress)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print(found)
    if not found.ok:
        raise CheckpointError(f"{path} has {found.num_errors} errors", "See the remedies above")


def _print(found: Diagnosis) -> None:
    from rich.text import Text

    console = wide_console()
    for name, fact in found.facts.items():
        console.print(Text(f"{name}: {fact}"))
    if found.findings:
        console.print(_table(found))
    counts = f"{found.num_errors} errors, {found.num_warnings} warnings" if found.findings else "no findings"
    console.print(Text(f"{found.path}: {counts}"))


def _table(found: Diagnosis) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for name in ("severity", "where", "problem", "remedy"):
        table.add_column(name, overflow="fold", no_wrap=name == "severity")
    for shown, more in _grouped(found):
        style = "red" if shown.severity == "error" else "yellow"
        problem = shown.problem + (f" (and {more} more of this kind: --json lists them)" if more else "")
        table.add_row(Text(shown.severity, style), Text(shown.where), Text(problem), Text(shown.remedy))
    return table


def _grouped(found: Diagnosis) -> Iterator[tuple[Finding, int]]:
    """Yields the first findings of each kind, the last of them with the number of omitted ones."""
    kinds: dict[tuple[str, str, str], list[Finding]] = {}
    for each in found.findings:
        kinds.setdefault((each.severity, each.check, each.kind), []).append(each)
    for alike in kinds.values():
        for at, each in enumerate(alike[:MOST_ALIKE], 1):
            yield each, max(0, len(alike) - MOST_ALIKE) if at == MOST_ALIKE else 0

"""`compress compare`: several packed checkpoints of one model, by size and quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.options import AsJson

if TYPE_CHECKING:
    from compress.reporting.comparison import Comparison


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Checkpoint folders that this toolkit wrote.")],
    by: Annotated[str, typer.Option(help="size (of the files) or bits (per parameter of the whole model).")] = "size",
    measure: Annotated[str, typer.Option(help="kl (to the dense model) or ppl (perplexity).")] = "kl",
    out: Annotated[Path | None, typer.Option("--out", help="Write an HTML page with the plot too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare checkpoints of one source by their reports, and mark those that another one beats in every way.

    Refuses reports with different sources, texts or protocols: their figures say nothing about each other.
    """
    from compress.reporting.compare_page import compare_page
    from compress.reporting.comparison import compare as compare_reports
    from compress.reporting.read import read_report
    from compress.reporting.write import write_page

    comparison = compare_reports([read_report(path.expanduser()) for path in paths], by, measure)
    if out is not None:
        write_page(compare_page(comparison), out.expanduser())
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(), indent=2))
    else:
        _print(comparison, out)


def _print(comparison: Comparison, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from compress.reporting.compare_page import HEAD, NUMERIC, table_rows

    table = Table(title=Text(f"Checkpoints of {comparison.source}"), title_justify="left")
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="right" if index in NUMERIC else "left", overflow="fold")
    for row in table_rows(comparison):
        table.add_row(*map(Text, row))
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    console.print(table)
    console.print(Text(f"Protocol: {comparison.protocol}"))
    if out is not None:
        console.print(Text(f"Wrote {out}"))

"""`compress report`: one page about a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint folder that this toolkit wrote.")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about a run: sizes, memory, quality, errors over depth, bits, smoothing, notes.

    It needs no script and loads nothing from elsewhere.
    """
    from compress.reporting.headers import read_headers
    from compress.reporting.read import read_report
    from compress.reporting.report_page import report_page
    from compress.reporting.write import write_page

    found = read_report(path.expanduser())
    write_page(report_page(found, read_headers(found)), out.expanduser())
    typer.echo(f"Wrote {out}")

"""The `compress` command line. Imports torch only inside of commands, so that help returns at once."""

from __future__ import annotations

import typer

from compress.checkpoint.terminal import run_cli
from compress.checkpoint.version import VersionOption
from compress.cli.compare import compare
from compress.cli.eval import evaluate
from compress.cli.export import export
from compress.cli.factorize import factorize
from compress.cli.prune import prune
from compress.cli.quantize import quantize
from compress.cli.report import report
from compress.cli.run import run
from compress.cli.search import search
from compress.cli.verify import verify

app = typer.Typer(
    name="compress",
    help="Make a language model several times smaller, measure what that costs, and check the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(quantize)
app.command()(prune)
app.command()(factorize)
app.command()(search)
app.command("eval")(evaluate)
app.command()(run)
app.command()(verify)
app.command()(export)
app.command()(report)
app.command()(compare)


@app.callback()
def options(version: VersionOption = False) -> None:
    """What belongs to no command."""


def main() -> None:
    """Entry point of the console script."""
    run_cli(app)

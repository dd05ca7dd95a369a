"""The `compress` command line. Imports torch only inside of commands, so that help returns at once."""

from __future__ import annotations

import typer

from compress.cli.check_commands import compare, evaluate, export, report, verify
from compress.cli.compress_commands import factorize, prune, quantize
from compress.cli.recipe_commands import run, search
from compress.common.cli import VersionOption, run_cli

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

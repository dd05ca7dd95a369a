"""The `compress` command line. Imports torch only inside commands, which keeps --help fast."""

from __future__ import annotations

import typer

from compress.cli.check_commands import compare, compare_logits, evaluate, report, verify
from compress.cli.compress_commands import factorize, prune, quantize, shrink
from compress.cli.doctor_command import doctor
from compress.cli.export_command import export
from compress.cli.finish_command import finish
from compress.cli.receipt_commands import reproduce
from compress.cli.recipe_commands import run, search
from compress.cli.serving_commands import fit
from compress.common.cli import VersionOption, run_cli, with_groups
from compress.stages.base import STAGES
from compress.stages.factorize import FactorizeStage
from compress.stages.finish import FinishStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.shrink import ShrinkStage


def make_app() -> typer.Typer:
    """Builds the command line, with an option for every registered method and its options."""
    app = typer.Typer(
        name="compress",
        help="Compress language models, evaluate the loss of quality, and verify the result.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain pages show every option name in full on 80 columns, and start faster
    )
    added = [stage.added_by for stage in STAGES.values() if stage.added_by]
    app.command()(with_groups(quantize, rounding=QuantizeStage.written_keys(), others=added[::-1]))
    app.command()(with_groups(prune, pruning=PruneStage.written_keys(pattern="2:4")))
    app.command()(with_groups(factorize, factors=FactorizeStage.written_keys()))
    app.command()(with_groups(shrink, removed=ShrinkStage.written_keys()))
    app.command()(with_groups(finish, training=FinishStage.written_keys()))
    for command in (search, run, verify, reproduce, doctor, export, report, compare):
        app.command()(command)
    app.command("eval")(evaluate)
    app.command("compare-logits")(compare_logits)
    app.command()(fit)
    app.callback()(options)
    return app


def options(version: VersionOption = False) -> None:
    """Options before a command."""


app = make_app()


def main() -> None:
    """Entry point of the console script."""
    run_cli(app)

"""The `runtime` command line. Commands import torch when they run, which keeps --help fast."""

from __future__ import annotations

import typer

from compress.common.cli import VersionOption, run_cli
from runtime.cli.batch import batch
from runtime.cli.bench import bench
from runtime.cli.chat import chat
from runtime.cli.deploy import deploy
from runtime.cli.generate import generate
from runtime.cli.memory import memory
from runtime.cli.prepare import prepare
from runtime.cli.serve import serve
from runtime.cli.simulate import simulate
from runtime.cli.warm_up import warm_up
from runtime.parallel.launch import find_launch

app = typer.Typer(
    name="runtime",
    help="Serve a packed or dense checkpoint, generate text with it, and benchmark it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain pages show every option name in full on 80 columns, and start faster
)
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command()(bench)
app.command()(memory)
app.command()(simulate)
app.command()(prepare)
app.command("warm-up")(warm_up)
app.add_typer(deploy)


@app.callback()
def options(version: VersionOption = False) -> None:
    """Options before a command."""


def main() -> None:
    """Entry point of the console script, and of each process that `torchrun` starts."""
    launch = find_launch()
    if launch is not None and not launch.is_first:
        from runtime.ranks import join_launch

        join_launch(launch)
    else:
        run_cli(app)

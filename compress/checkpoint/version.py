"""Which version of this toolkit is installed, and the option of both command lines that says it."""

from __future__ import annotations

from typing import Annotated

import typer

DISTRIBUTION = "compress-runtime"


def tool_version() -> str:
    """Version of this toolkit; `unknown` when it runs from a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"{DISTRIBUTION} {tool_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]

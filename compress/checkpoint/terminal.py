"""How both command lines end: refusals as one line, Ctrl-C as status 130. Free of torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from compress.checkpoint.errors import ToolkitError

if TYPE_CHECKING:
    import typer

INTERRUPTED = 130


def run_cli(app: typer.Typer) -> None:
    """Runs a Typer application and leaves the process; it never returns.

    A ToolkitError becomes one line `error: <problem>. <remedy>` on stderr and status 1, Ctrl-C becomes status 130, and
    wrong options keep Typer's own message and status 2.
    """
    try:
        app()
    except ToolkitError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as stop:
        if _came_from_ctrl_c(stop):
            sys.exit(INTERRUPTED)
        raise


def _came_from_ctrl_c(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt started this chain: Typer versions wrap it in exits of different status."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None

"""How both command lines end: refusals as one line, Ctrl-C as status 130. Free of torch."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from compress.checkpoint.errors import ToolkitError

if TYPE_CHECKING:
    import typer

INTERRUPTED = 130
REMEDIES = {
    errno.ENOSPC: "Free space, or write to another disk",
    errno.EDQUOT: "Free space, or write to another disk",
    errno.EACCES: "Change its permissions, or name another path",
    errno.EROFS: "Name a path on a writable disk",
}
"""What the user can do about failures of the system that may come from any read or write."""


def run_cli(app: typer.Typer) -> None:
    """Runs a Typer application and leaves the process; it never returns.

    A ToolkitError, a full disk or a path that the system refuses becomes one line `error: <problem>. <remedy>` on
    stderr and status 1, Ctrl-C becomes status 130, and wrong options keep Typer's own message and status 2.
    """
    let_threads_sleep()
    try:
        app()
    except ToolkitError as error:
        _refuse(error)
    except OSError as error:
        if error.errno not in REMEDIES and error.filename is None:
            raise
        remedy = REMEDIES.get(error.errno or 0, "Name another path")
        _refuse(ToolkitError(f"{error.strerror}: {error.filename or 'while writing'}", remedy))
    except (KeyboardInterrupt, SystemExit) as stop:
        if _came_from_ctrl_c(stop):
            sys.exit(INTERRUPTED)
        raise


def _refuse(error: ToolkitError) -> NoReturn:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(1)


def let_threads_sleep() -> None:
    """Makes torch's worker threads sleep while they wait, unless the user's environment says otherwise.

    By default they spin. Beside any other busy thread (a server's event loop, a second process) the spinning one keeps
    the core that the other needs: on two busy cores a matrix product of 8 us took 57 ms. OpenMP reads the variable when
    torch is loaded, so this comes before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _came_from_ctrl_c(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt started this chain: Typer versions wrap it in exits of different status."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None

"""Progress display of the server start on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from runtime.core.progress import StartProgress

FRAMES_PER_SECOND = 5


@contextmanager
def showing(progress: StartProgress, console: Console | None = None) -> Iterator[None]:
    """Shows the progress of the start in the last line of a terminal, by default that of standard error.

    Does nothing without a terminal. The line is cleared at the end of the block; the block must not print to standard
    output.
    """
    if not (console.is_terminal if console else sys.stderr.isatty()):
        yield  # does not import rich, which would take a tenth of the start
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = console or Console(stderr=True)

    def line() -> Text:
        return Text(f"starting  {progress.elapsed:.0f} s: {progress.position}", no_wrap=True, overflow="ellipsis")

    with Live(
        get_renderable=line,
        console=console,
        transient=True,
        refresh_per_second=FRAMES_PER_SECOND,
        redirect_stdout=False,
    ):
        yield

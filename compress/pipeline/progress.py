"""What a run shows while it works: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class RunDisplay:
    """Progress over blocks (or other units), on standard error.

    Args:
        total: number of blocks.
        done: blocks that an earlier run finished.
        quiet: show nothing.
        unit: what is counted.
    """

    def __init__(self, total: int, done: int = 0, quiet: bool = False, unit: str = "block") -> None:
        self._total = total
        self._unit = unit
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._block = done
        self._started = time.monotonic()
        if not quiet and sys.stderr.isatty():
            self._bar = _make_bar()
            self._task = self._bar.add_task("starting", total=total, completed=done)

    def __enter__(self) -> RunDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str, fraction: float = 0.0) -> None:
        """Says what happens inside the current block, and how much of the block is done."""
        if self._bar is not None:
            description = f"{self._unit} {min(self._block + 1, self._total)}/{self._total}: {what}"
            self._bar.update(self._task, description=description, completed=self._block + fraction)

    def finish(self, line: str = "") -> None:
        """One block is done; prints a line about it, if there is one, with the seconds it took."""
        self._block += 1
        elapsed = time.monotonic() - self._started
        self._started = time.monotonic()
        if line:
            number = f"{self._block:>{len(str(self._total))}}"
            self.say(f"{self._unit} {number}/{self._total}  {line}  {elapsed:.1f} s")
        if self._bar is not None:
            self._bar.update(self._task, completed=self._block)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)

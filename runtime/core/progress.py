"""Progress of loading a model: stages that a loader reports, and their durations. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """Stage of a start, as text for the user."""

    LIBRARIES = "importing libraries"
    ACTIVATIONS = "measuring 8-bit activations"
    WEIGHTS = "reading weights"
    COMPILATION = "compiling kernels"
    STEPS = "computing and recording steps"


Report = Callable[[Stage, int, int], None]
"""Callback with a stage, its completed parts and its total parts."""


def ignore(stage: Stage, done: int, total: int) -> None:
    """Ignores a report."""


@dataclass(frozen=True, slots=True)
class Position:
    """State of a start.

    Attributes:
        done, total: completed and total parts of the stage; both 0 if they cannot be counted.
        since: start time of the stage in seconds of the clock.
    """

    stage: Stage
    done: int
    total: int
    since: float

    def __str__(self) -> str:
        return f"{self.stage}, {self.done} of {self.total}" if self.total else self.stage


class StartProgress:
    """Progress callback that stores the current position. One thread reports, any thread may read.

    Attributes:
        position: the last report.
        seconds: durations of completed stages in order.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.position = Position(Stage.LIBRARIES, 0, 0, self._began)
        self.seconds: dict[Stage, float] = {}

    def __call__(self, stage: Stage, done: int, total: int) -> None:
        since = self.position.since
        if stage != self.position.stage:
            since = self._end_stage()
        self.position = Position(stage, done, total, since)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def summary(self) -> str:
        """Ends the last stage and returns a summary: `4.2 s: importing libraries 2.9 s, reading weights 1.3 s`."""
        self._end_stage()
        return f"{self.elapsed:.1f} s: " + ", ".join(f"{stage} {each:.1f} s" for stage, each in self.seconds.items())

    def _end_stage(self) -> float:
        now, last = self._clock(), self.position
        self.seconds = self.seconds | {last.stage: self.seconds.get(last.stage, 0.0) + now - last.since}
        return now

"""Commands run one after the other, each within its own time.

The summary is written before and after every step, so that it holds what is known also when all of it is killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUMMARY, LOG, RUNNING = "summary.json", "log.txt", "running.txt"
"""Files of a run: outcomes; the output of its steps; that of the step under way."""
GRACE_SECONDS = 5
"""Time that a step has to end once it is asked to."""
LOG_BYTES = 2**20
"""Most output that is kept of one step: its beginning and, three times as much, its end."""
NOT_REACHED, IS_RUNNING, PASSED, FAILED, NO_TIME = "not reached", "running", "passed", "failed", "ran out of time"
SKIPPED = "skipped: "


@dataclass(frozen=True)
class Step:
    """A command and its time.

    Attributes:
        needs, packages: a program and Python packages without which the step is skipped.
        is_required: whether later steps are pointless when it fails. One that runs out of time shows nothing.
        environment: variables that are added.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    needs: str = ""
    is_required: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    @property
    def missing(self) -> str:
        """Program or package that the step needs and this machine lacks; empty where it has all."""
        program = self.needs if self.needs and shutil.which(self.needs) is None else ""
        return program or next((each for each in self.packages if find_spec(each) is None), "")


@dataclass
class Result:
    """Outcome of a step.

    Attributes:
        tests: how many tests had which outcome, where the step runs tests.
        failed: tests that failed.
        under_way: tests that had begun and not ended.
    """

    name: str
    limit: float
    outcome: str = NOT_REACHED
    seconds: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    under_way: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.outcome == PASSED or self.outcome.startswith(SKIPPED)

    def __str__(self) -> str:
        tests = ", ".join(f"{number} {outcome.lower()}" for outcome, number in sorted(self.tests.items()))
        return f"{self.name:12} {self.seconds:5.0f} s of {self.limit:4.0f}  {self.outcome}{tests and f' ({tests})'}"


class InterruptionError(Exception):
    """All of it is told to end."""


def run_steps(steps: Sequence[Step], folder: Path, about: Mapping[str, Any], kept: Path | None = None) -> bool:
    """Runs steps and leaves their files in `folder`, which is emptied before.

    Args:
        kept: a file that a step reads, wherever it is.
        about: further entries of the summary.

    Returns:
        Whether every step passed or was skipped.
    """
    _empty(folder, kept)
    results = [Result(step.name, step.seconds) for step in steps]
    with _interruptible():
        try:
            _run_all(steps, results, folder, about)
        except InterruptionError as interruption:
            _write(folder, results, about)
            print(f"interrupted by {interruption}", flush=True)
    return all(result.is_good for result in results)


def _run_all(steps: Sequence[Step], results: Sequence[Result], folder: Path, about: Mapping[str, Any]) -> None:
    for step, result in zip(steps, results, strict=True):
        if step.missing:
            result.outcome = f"{SKIPPED}{step.missing} is not installed"
        else:
            result.outcome = IS_RUNNING
            _write(folder, results, about)
            _run(step, result, folder)
        print(result, flush=True)
        _write(folder, results, about)
        if step.is_required and result.outcome.startswith(FAILED):
            return


def _run(step: Step, result: Result, folder: Path) -> None:
    """Runs a step within its limit, with all processes that it starts."""
    begun, output = time.monotonic(), folder / RUNNING
    with output.open("wb") as stream:
        environment = {**os.environ, **step.environment}
        process = subprocess.Popen(
            step.command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(result.limit)
            result.outcome = PASSED if status == 0 else f"{FAILED} with status {status}"
        except subprocess.TimeoutExpired:
            result.outcome = NO_TIME
        except InterruptionError as interruption:
            result.outcome = f"interrupted by {interruption}"
            raise
        finally:
            _end(process)
            result.seconds = round(time.monotonic() - begun, 1)
            _keep_output(step, result, output, folder / LOG)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a step. A process that waits for a driver cannot be killed and keeps running."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _keep_output(step: Step, result: Result, output: Path, log: Path) -> None:
    content = output.read_bytes()
    _count_tests(result, content.decode(errors="replace"))
    if len(content) > LOG_BYTES:
        content = content[: LOG_BYTES // 4] + b"\n[...]\n" + content[-LOG_BYTES * 3 // 4 :]
    with log.open("ab") as stream:
        stream.write(f"\n==== {result}\n{' '.join(step.command)}\n".encode() + content)
    output.unlink()
    if not result.is_good:
        print(content[-2000:].decode(errors="replace"), flush=True)


OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
BY_WORKER = re.compile(rf"^\[gw\d+\](?: \[ *\d+%\])? ({OUTCOMES}) (\S.*?) *$", re.MULTILINE)
BY_ITSELF = re.compile(rf"^(\S+::.*?) ({OUTCOMES})\b.*$", re.MULTILINE)
BEGUN = re.compile(rf"^(\S+\.py::(?:(?! (?:{OUTCOMES})\b).)*?) *$", re.MULTILINE)


def _count_tests(result: Result, text: str) -> None:
    """Reads the lines that `pytest -v` writes as tests begin and end, with workers or without."""
    ended = [(match[2], match[1]) for match in BY_WORKER.finditer(text)]
    ended += [
        (match[1], match[2]) for match in BY_ITSELF.finditer(text) if not match[0].startswith(("FAILED", "ERROR"))
    ]
    result.tests = dict(Counter(outcome for _, outcome in ended))
    result.failed = [name for name, outcome in ended if outcome in ("FAILED", "ERROR")]
    if result.outcome != PASSED and ended:
        result.under_way = sorted({match[1] for match in BEGUN.finditer(text)} - {name for name, _ in ended})


def _write(folder: Path, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    content = {**about, "passed": all(each.is_good for each in results), "steps": [asdict(each) for each in results]}
    partial = folder / f"{SUMMARY}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / SUMMARY)


def _empty(folder: Path, kept: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if kept is None or not (kept.is_file() and file.samefile(kept)):
            file.unlink()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raises InterruptionError when the process is told to end."""

    def interrupt(number: int, frame: object) -> None:
        raise InterruptionError(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

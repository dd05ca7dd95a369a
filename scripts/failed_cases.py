"""Tells which cases of tests that failed stand in a change's way: those that fail again, and did not fail before it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

LONGEST_CHANGE = 12 * 3600
"""Seconds from the first to the last commit of one change: three sessions of work on it, and the runs of CI between."""


class Outcome(Enum):
    PASSED = auto()
    FAILED = auto()
    UNKNOWN = auto()
    """It did not end in time, or is not there."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A checkout in which single cases are run, each in a process of its own.

    Attributes:
        options: of pytest.
        end: seconds since the epoch; a case that runs by then is stopped.
    """

    folder: Path
    options: Sequence[str]
    environment: Mapping[str, str]
    end: float

    def run(self, case: str) -> Outcome:
        """Runs a case. Only pytest's own word that it failed counts as a failure."""
        if time.time() >= self.end:
            return Outcome.UNKNOWN
        command = [sys.executable, "-m", "pytest", *self.options, case]
        environment = {**self.environment, "PYTHONPATH": str(self.folder)}
        process = subprocess.Popen(command, cwd=self.folder, env=environment, start_new_session=True)
        try:
            status = process.wait(max(0.0, self.end - time.time()))
        except subprocess.TimeoutExpired:
            # With the servers that it started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome.UNKNOWN
        return {0: Outcome.PASSED, 1: Outcome.FAILED}.get(status, Outcome.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Cases that failed.

    Attributes:
        unstable: they passed when they were run again, alone.
        known: they fail at the commit before the change as well.
        blocking: all others.
    """

    unstable: list[str]
    known: list[str]
    blocking: list[str]

    def lines(self) -> list[str]:
        """For people; the kinds that there are."""
        kinds = (
            ("unstable (failed, then passed alone)", self.unstable),
            ("known (fails before this change as well)", self.known),
            ("failed", self.blocking),
        )
        found = [(f"{kind}: {len(cases)}", *(f"  {case}" for case in cases)) for kind, cases in kinds if cases]
        return [line for lines in found for line in lines]


def failed_cases(cache: Path) -> list[str]:
    """Returns the cases that failed in the one run of pytest that had this new folder as its `cache_dir`."""
    file = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def judge(cases: Sequence[str], here: Alone, before: Callable[[], AbstractContextManager[Alone | None]]) -> Verdict:
    """Runs cases that failed again, and those that fail again before the change.

    Args:
        before: a checkout of the commit before the change; None where there is none.
    """
    unstable = [case for case in cases if here.run(case) is Outcome.PASSED]
    again = [case for case in cases if case not in unstable]
    if not again:
        return Verdict(unstable, [], [])
    with before() as earlier:
        known = [case for case in again if earlier is not None and earlier.run(case) is Outcome.FAILED]
    return Verdict(unstable, known, [case for case in again if case not in known])


def commit_before(repository: Path) -> str | None:
    """Returns the newest commit older than the change: where HEAD left the remote's branch. Where the remote names none
    (a clone of what is to land has HEAD there), the newest commit `LONGEST_CHANGE` older than HEAD, else its parent."""
    head = _git(repository, "rev-parse", "HEAD")
    landed = _git(repository, "merge-base", "HEAD", "refs/remotes/origin/HEAD")
    if landed and landed != head:
        return landed
    begin = int(_git(repository, "show", "-s", "--format=%ct", "HEAD")) - LONGEST_CHANGE
    older = _git(repository, "rev-list", "-1", "--first-parent", f"--before={begin}", "HEAD")
    return older or _git(repository, "rev-parse", "--verify", "--quiet", "HEAD~1") or None


@contextmanager
def checked_out(repository: Path, commit: str) -> Iterator[Path]:
    """A folder with a commit of the repository, removed in the end."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "before"
        _git(repository, "worktree", "add", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            _git(repository, "worktree", "remove", "--force", str(folder))


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True).stdout.strip()

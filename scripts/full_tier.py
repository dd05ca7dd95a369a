"""Runs the full tier of the tests, what the quick tier leaves out, in a box of time.

Begins at a test file that the commit's hash chooses, so that successive commits reach different files, and lists what
it did not reach. The hash seeds the examples of property tests, too: a failure comes again with its commit. With
`--instruction-set by-commit` it chooses the instruction set as well; with one that this machine exceeds, the cases of
the quick tier run, too. Running out of time is not a failure; a failing test is, unless it passes alone (unstable) or
fails at the commit before the change as well (known); those are listed. Further arguments are given to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from failed_cases import Alone, checked_out, commit_before, failed_cases, judge
from instruction_sets import ALL, available, build_library, forced

from compress.cpu.binding import best_instruction_set

ROOT = Path(__file__).resolve().parents[1]
SELECTION = "full or slow or hypothesis"
CASE_SECONDS = 1800  # a case that takes longer hangs; the slowest took 515 s on the slowest machine so far
RERUN_MINUTES = 8  # for cases that failed, after the box; as long again at the commit before the change
BY_COMMIT = "by-commit"
TESTS_FAILED, NOTHING_SELECTED = 1, 5  # pytest's exit statuses


def seed_of(commit: str) -> int:
    return int(commit[:8], 16)


def rotated(files: list[str], start: int) -> list[str]:
    return files[start:] + files[:start]


def test_files() -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))


def current_commit() -> str:
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "0"


def repeatable(seed: int) -> list[str]:
    """Options with which a property test draws the same examples again."""
    return ["--hypothesis-profile", "full", "--hypothesis-seed", str(seed), "--timeout", str(CASE_SECONDS)]


def command(files: list[str], workers: int, end: float, seed: int, selection: str, extra: list[str]) -> list[str]:
    """pytest over `files` in their order, one file at a time per worker."""
    parallel = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers else ["-n", "0"]
    tier = ["-m", selection, *repeatable(seed), "--until", str(end)]
    return [sys.executable, "-m", "pytest", *parallel, *tier, "--durations", "20", *extra, *files]


@contextmanager
def before_the_change(here: Alone, name: str) -> Iterator[Alone | None]:
    """A checkout of the commit before the change, with the library compiled for a set; None where there is none."""
    commit = commit_before(ROOT)
    if commit is None:
        yield None
        return
    with checked_out(ROOT, commit) as folder:
        print(f"full tier: what fails again is run at {commit[:8]}, before this change", flush=True)
        built = build_library(folder, name)
        yield replace(here, folder=folder, end=time.time() + RERUN_MINUTES * 60) if built else None


def run(arguments: list[str], alone: list[str], name: str, environment: Mapping[str, str]) -> int:
    """Runs pytest, and cases that failed again, one at a time with the options `alone`. Returns an exit status."""
    with TemporaryDirectory() as cache:
        status = subprocess.run([*arguments, "-o", f"cache_dir={cache}"], cwd=ROOT, env=environment).returncode
        cases = failed_cases(Path(cache))
    if status != TESTS_FAILED or not cases:
        return 0 if status == NOTHING_SELECTED else status
    here = Alone(ROOT, alone, environment, time.time() + RERUN_MINUTES * 60)
    verdict = judge(cases, here, lambda: before_the_change(here, name))
    print("\n".join(verdict.lines()), flush=True)
    return TESTS_FAILED if verdict.blocking else 0


def main() -> int:
    sets = available(best_instruction_set())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40, help="the box of time (default: %(default)s)")
    parser.add_argument("--start", type=int, help="index of the first file (default: from the commit)")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--instruction-set", choices=[*sets, BY_COMMIT], default=ALL, help="default: %(default)s")
    options, extra = parser.parse_known_args()
    files, seed = test_files(), seed_of(current_commit())
    start = (seed if options.start is None else options.start) % len(files)
    name = sets[seed // len(files) % len(sets)] if options.instruction_set == BY_COMMIT else options.instruction_set
    print(f"full tier: {options.minutes:g} minutes from {files[start]}, instruction set {name}", flush=True)
    with forced(name) as environment:
        end, selection = time.time() + options.minutes * 60, SELECTION if name == ALL else ""
        whole = command(rotated(files, start), options.workers, end, seed, selection, extra)
        return run(whole, ["-n", "0", "-m", "", *repeatable(seed)], name, environment)


if __name__ == "__main__":
    sys.exit(main())

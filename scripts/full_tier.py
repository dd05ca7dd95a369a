"""Runs the full tier of the tests, what the quick tier leaves out, in a box of time.

Begins at a test file that the commit's hash chooses, so that successive commits reach different files, and lists what
it did not reach. The hash seeds the examples of property tests, too: a failure comes again with its commit. Running out
of time is no failure; a failing test is. Further arguments are given to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SELECTION = "full or slow or hypothesis"
CASE_SECONDS = 1800  # a case that takes longer hangs; the slowest took 515 s on the slowest machine so far
NOTHING_SELECTED = 5  # pytest's exit status


def seed_of(commit: str) -> int:
    return int(commit[:8], 16)


def rotated(files: list[str], start: int) -> list[str]:
    return files[start:] + files[:start]


def test_files() -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))


def current_commit() -> str:
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "0"


def command(files: list[str], workers: int, end: float, seed: int, extra: list[str]) -> list[str]:
    """pytest over `files` in their order, one file at a time per worker."""
    parallel = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers else ["-n", "0"]
    tier = ["-m", SELECTION, "--hypothesis-profile", "full", "--hypothesis-seed", str(seed)]
    tier += ["--until", str(end), "--timeout", str(CASE_SECONDS)]
    return [sys.executable, "-m", "pytest", *parallel, *tier, "--durations", "20", *extra, *files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40, help="the box of time (default: %(default)s)")
    parser.add_argument("--start", type=int, help="index of the first file (default: from the commit)")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    options, extra = parser.parse_known_args()
    files, seed = test_files(), seed_of(current_commit())
    start = (seed if options.start is None else options.start) % len(files)
    print(f"full tier: {options.minutes:g} minutes from {files[start]}", flush=True)
    end = time.time() + options.minutes * 60
    status = subprocess.run(command(rotated(files, start), options.workers, end, seed, extra), cwd=ROOT).returncode
    return 0 if status == NOTHING_SELECTED else status


if __name__ == "__main__":
    sys.exit(main())

"""Summary of one part of `scripts/gpu_check.sh` as a table and as JSON; exits with status 1 when a step failed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

STEPS, SUMMARY = "steps.tsv", "summary.json"
TIMED_OUT = ("124", "137")
"""Statuses of a command that `timeout` ended."""


@dataclass(frozen=True)
class Step:
    """One step of the check: its outcome, its seconds and their limit."""

    name: str
    outcome: str
    seconds: int
    limit: int

    @property
    def failed(self) -> bool:
        return self.outcome.startswith(("failed", "ran out"))

    def __str__(self) -> str:
        return f"{self.name:14} {self.seconds:4} s of {self.limit:4}  {self.outcome}"


def read_steps(path: Path) -> list[Step]:
    """Lines of name, status (or the reason for skipping), seconds and limit, separated by tabs."""
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, status, seconds, limit = line.split("\t")
        steps.append(Step(name, _outcome(status), int(seconds), int(limit)))
    return steps


def _outcome(status: str) -> str:
    if not status.isdigit():
        return f"skipped: {status}"
    if status in TIMED_OUT:
        return "ran out of time"
    return "passed" if status == "0" else f"failed with status {status}"


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    steps = read_steps(folder / STEPS)
    print("\n".join(map(str, steps)))
    files = sorted(file for file in folder.glob("*.json") if file.name != SUMMARY)
    figures = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    content = {"steps": [asdict(step) for step in steps], **figures}
    (folder / SUMMARY).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return int(any(step.failed for step in steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

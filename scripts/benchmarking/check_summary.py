"""Summary of `scripts/gpu_check.sh` as a table and as JSON; exits with status 1 when a part failed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

TIMED_OUT = ("124", "137")
"""Statuses of a command that `timeout` ended."""
FIGURES = ("kernels.json", "models.json")
"""Files that the benchmarks of the check write beside the summary."""


@dataclass(frozen=True)
class Part:
    """One part of the check: its outcome, its seconds and their limit."""

    name: str
    outcome: str
    seconds: int
    limit: int

    @property
    def failed(self) -> bool:
        return self.outcome.startswith(("failed", "ran out"))

    def __str__(self) -> str:
        return f"{self.name:14} {self.seconds:4} s of {self.limit:4}  {self.outcome}"


def read_parts(path: Path) -> list[Part]:
    """Lines of name, status (or why it was skipped), seconds and limit, parted by tabs."""
    parts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, status, seconds, limit = line.split("\t")
        parts.append(Part(name, _outcome(status), int(seconds), int(limit)))
    return parts


def _outcome(status: str) -> str:
    if not status.isdigit():
        return f"skipped: {status}"
    if status in TIMED_OUT:
        return "ran out of time"
    return "passed" if status == "0" else f"failed with status {status}"


def main(arguments: list[str]) -> int:
    results, out = map(Path, arguments)
    parts = read_parts(results)
    print("\n".join(map(str, parts)))
    files = [results.parent / name for name in FIGURES]
    figures = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()}
    content = {"parts": [asdict(part) for part in parts], **figures}
    out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

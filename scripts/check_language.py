"""Finds phrases that must not come back into code and docs; see `PHRASES` for each and its reason.

    python scripts/check_language.py              all tracked files
    python scripts/check_language.py docs runtime/cli/serve.py
    python scripts/check_language.py --count      findings by folder

Prints `file:line: phrase: reason` for each finding; exits with status 1 when there is one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SUFFIXES = (".py", ".md", ".yaml", ".sh", ".c", ".h", ".js", ".html")
EXCLUDED = (
    "calibration/data/",
    "tests/data/",
    "compress/demo_model",
    "runtime/server/page/vendor/",
    "LICENSE",
    "scripts/check_language.py",
    "tests/scripts/test_check_language.py",
)
PHRASES = {
    "so many": "write the number, or 'this many'",
    "nobody": "name the mechanism: no request, no caller",
    "somebody": "name the role: the caller, a user, another process",
    "was said": "write 'was given', 'was requested' or 'was printed'",
    "were said": "write 'were given', 'were requested' or 'were printed'",
    "is said": "write 'is printed', 'is reported' or 'is given'",
    "made up for": "write 'compensated'",
    "make up for": "write 'compensate'",
    "makes up for": "write 'compensates'",
    "but for": "write 'except', 'except for' or 'up to'",
    "shall have": "write 'has', 'must have' or 'should have'",
    "of which no": "make it two clauses",
    "stands for itself": "write 'needs no explanation', or leave it out",
    "there is none such": "write 'there is none'",
    "what mends": "write 'remedy' or 'what fixes'",
    "that mends": "write 'remedy' or 'that fixes'",
    "anew": "write 'again' or 'start over'",
    "there is no memory": "write 'out of memory'",
    "help is instant": "write 'keeps --help fast'",
    "help must be instant": "write 'keeps --help fast'",
    "next to nothing": "write 'almost nothing', or the number",
    "told otherwise": "write 'by default' or 'unless set'",
    "in our words": "name the message or the key",
    "as it was typed": "write 'as the user gave it'",
    "bargain": "name the cost and the gain",
    "gone on from": "write 'continued from'",
}
"""Phrases, and what to write instead."""
OPENERS = re.compile(r'(?P<quote>"""|/\*\*? )(?P<phrase>What|Of|How)\b')
OPENER_REASON = "begin a docstring with a verb or a noun"
GAP = r"(?:\s+(?:#|//|\*|>)?\s*)"
"""Between words: also a line break, with the mark of a comment."""
PATTERNS = {
    re.compile(rf"\b{GAP.join(map(re.escape, phrase.split()))}\b", re.IGNORECASE): reason
    for phrase, reason in PHRASES.items()
}


@dataclass(frozen=True)
class Finding:
    """One forbidden phrase in a file."""

    file: Path
    line: int
    phrase: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.phrase}: {self.reason}"


def tracked_files(folder: Path) -> list[Path]:
    """Files under version control that are checked, relative to the root of the repository."""
    names = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.splitlines() if name.endswith(SUFFIXES) and not name.startswith(EXCLUDED)]


def find(file: Path, text: str) -> Iterator[Finding]:
    """Findings of one file, phrase by phrase."""
    for pattern, reason in PATTERNS.items():
        for match in pattern.finditer(text):
            yield Finding(file, _line(text, match.start()), re.sub(GAP, " ", match[0]), reason)
    if file.suffix in (".py", ".c", ".h"):
        for match in OPENERS.finditer(text):
            yield Finding(file, _line(text, match.start()), f"{match['quote']}{match['phrase']}", OPENER_REASON)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def find_all(root: Path, files: Iterable[Path]) -> list[Finding]:
    """Findings of all files, by file and line. Files that are deleted but still tracked are left out."""
    found = [
        finding
        for file in files
        if (root / file).is_file()
        for finding in find(file, (root / file).read_text(encoding="utf-8"))
    ]
    return sorted(found, key=lambda finding: (finding.file, finding.line))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders, relative to the repository; default: all")
    parser.add_argument("--count", action="store_true", help="print the number of findings of each folder")
    options = parser.parse_args(arguments)
    files = [
        file
        for file in tracked_files(REPOSITORY)
        if not options.paths or any(file.is_relative_to(path.rstrip("/")) for path in options.paths)
    ]
    found = find_all(REPOSITORY, files)
    folders = Counter("/".join(finding.file.parts[:2][: len(finding.file.parts) - 1]) or "." for finding in found)
    lines = [f"{count:5} {folder}" for folder, count in sorted(folders.items())] if options.count else map(str, found)
    print("\n".join([*lines, f"{len(found)} findings in {len(files)} files"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

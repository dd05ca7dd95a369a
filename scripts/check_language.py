"""Finds phrases that must not come back into code and docs; see `PHRASES` for each and its reason.

In Markdown, and in comments, docstrings and messages of Python files, it also finds `ODD_USES` of ordinary words, and
the words that docs/glossary.md replaces by others. Of the strings under tests/ only those in triple quotes are
searched, as most others are data.

    python scripts/check_language.py              all tracked files
    python scripts/check_language.py docs runtime/cli/serve.py
    python scripts/check_language.py --count      findings by folder

Prints `file:line: phrase: reason` for each finding; exits with status 1 when there is one.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
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
ODD_USES = {
    r"\bthere\s+(?:is|are|was|were)\s+no\b"
    r"|(?P<odd>\b(?:is|are|was|were)\s+no)\b"
    r"(?!\s+(?:longer|more|less|better|worse|\w+er\s+than)\b)": "write 'is not a'",
    r"(?P<odd>\bbeside)\b": "write 'next to', 'in addition to', 'compared with' or 'while ... runs'",
    r"\blags?\s+behind\b|\bbehind\s+(?:(?:a|an|one|the)\s+)?(?:reverse\s+)?(?:proxy|gateway|load\s+balancer)\b"
    r"|(?P<odd>\bbehind)\b": "write 'after'",
    r"\b(?:is|are|was|were|not)\s+met\b|\bmeets?(?:\s+\w+){0,3}\s+(?:aim|bound|condition|limit|requirement|target)s?\b"
    r"|(?P<odd>\bmeets?|\bmet)\b": "write what happens, such as 'is multiplied by' or 'finds'",
    r"(?P<odd>\b(?:those|them|these|text|weights|files|integers|bits?|signs|activations|b?float\d+)\s+alone)\b"
    r"(?=\s*(?:[.,;:|)]|$))": "write 'only'",
}
"""Patterns of words in prose, whose group `odd` takes part where the use is odd, and what to write instead."""
NOT_PROSE = re.compile(r"^ *```.*?^ *```|`[^`]*`|\]\([^)]*\)|\{[^{}]*\}|^ +[\w, ]+:(?= )", re.DOTALL | re.MULTILINE)
"""Code blocks, code, targets of links, fields of strings and names of arguments."""
GLOSSARY_TABLE = "| word | means | do not write |"


def replaced_words(glossary: str) -> dict[re.Pattern[str], str]:
    """Reads the words that the glossary replaces: those in backticks in the last column of its table of words."""
    table = glossary.partition(GLOSSARY_TABLE)[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {
        re.compile(
            rf"(?P<odd>\b{GAP.join(map(re.escape, word.split()))}s?)\b", re.IGNORECASE
        ): f"write '{cells[0].strip()}'"
        for cells in rows
        for word in re.findall(r"`([^`]+)`", cells[-1])
    }


PROSE_PATTERNS = {
    **{re.compile(pattern, re.IGNORECASE | re.MULTILINE): reason for pattern, reason in ODD_USES.items()},
    **replaced_words((REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")),
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
    if file.suffix == ".md":
        yield from _find_in_prose(file, text)
    if file.suffix == ".py":
        quote = '"""' if file.parts[0] == "tests" else ""
        yield from _find_in_prose(file, python_prose(text, quote))


def python_prose(text: str, quote: str = "") -> str:
    """Blanks all of a Python file but comments, and strings of several words that begin with `quote`."""
    lines = text.splitlines(keepends=True)
    kept = [blanked(line) for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" or (
            kind in ("STRING", "FSTRING_MIDDLE") and " " in token.string and token.string.startswith(quote)
        ):
            (first, begin), (last, end) = token.start, token.end
            for row in range(first - 1, last):
                start, stop = begin if row == first - 1 else 0, end if row == last - 1 else len(lines[row])
                kept[row] = kept[row][:start] + lines[row][start:stop] + kept[row][stop:]
    return "".join(kept)


def blanked(text: str) -> str:
    """Replaces all characters but line breaks."""
    return re.sub(r"[^\n]", "_", text)


def _find_in_prose(file: Path, text: str) -> Iterator[Finding]:
    """Findings of text outside of code and links."""
    prose = NOT_PROSE.sub(lambda match: blanked(match[0]), text)
    for pattern, reason in PROSE_PATTERNS.items():
        for match in pattern.finditer(prose):
            if match["odd"]:
                yield Finding(file, _line(prose, match.start()), " ".join(match["odd"].split()), reason)


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

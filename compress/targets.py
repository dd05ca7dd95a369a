"""Patterns of modules, for `--ignore` and recipes. A pattern without a match is an error."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from compress.common.errors import RecipeError

REGEX_PREFIX = "re:"
IGNORE_HELP = "Layer to leave unchanged: a name (down_proj), a glob, or re:PATTERN. Repeatable."
_MAX_SUGGESTIONS = 4


def matches(pattern: str, module: str) -> bool:
    """Return whether a pattern matches a module.

    `re:...` is a regular expression matched from the start of the name, a pattern with `*`, `?` or `[` is a glob over
    the whole name, and anything else is a name: of the module, of its last parts (`down_proj`), or of one around it.
    Raises RecipeError: a regular expression that does not compile.
    """
    if pattern.startswith(REGEX_PREFIX):
        return _compiled(pattern).match(module) is not None
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(module, pattern)
    return module == pattern or module.endswith(f".{pattern}") or module.startswith(f"{pattern}.")


def select(patterns: Sequence[str], modules: Sequence[str], what: str) -> set[str]:
    """Return the modules that any of the patterns matches. Raises RecipeError: a pattern without a match; names the
    nearest ones."""
    selected: set[str] = set()
    for pattern in patterns:
        found = {module for module in modules if matches(pattern, module)}
        if not found:
            raise RecipeError(f"{what} pattern {pattern!r} matches no linear layer", _suggestion(pattern, modules))
        selected |= found
    return selected


def without_indices(module: str) -> str:
    """Return the kind of a module: its name with every number replaced by `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(REGEX_PREFIX))
    except (re.error, RecursionError, OverflowError) as error:
        raise RecipeError(
            f"{reprlib.repr(pattern)} is not a regular expression: {error}", "Correct it, or use a glob"
        ) from error


def _suggestion(pattern: str, modules: Sequence[str]) -> str:
    candidates = set(_kinds(modules))
    wanted = pattern.removeprefix(REGEX_PREFIX)
    near = sorted(candidates, key=lambda name: (-SequenceMatcher(None, wanted, name).ratio(), name))
    return f"Nearest: {', '.join(near[:_MAX_SUGGESTIONS])}"


def _kinds(modules: Sequence[str]) -> Iterable[str]:
    for module in modules:
        yield without_indices(module)
        yield module.rpartition(".")[2]

"""The interface of a check, and the registry of checks.

A check is one file in `compress/doctor/checks` with a class derived from `Check` and decorated with `register`. An
examination makes one of each: `start` reads files and headers, `tensor` sees every tensor in turn, `finish` judges what
all of them say together. So every tensor is read once, however many checks there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, TypeVar

from compress.doctor.findings import Finding, Severity
from compress.doctor.view import StoredTensor, View

AGAIN = "Download or write this checkpoint again"
"""Remedy of damage that nothing but the original mends."""


class Check:
    """One examination of one checkpoint.

    Attributes:
        name: of the check, in findings.
        view: the checkpoint.
    """

    name: ClassVar[str]

    def __init__(self, view: View) -> None:
        self.view = view

    def start(self) -> Iterator[Finding]:
        """Yields what files and headers show."""
        yield from ()

    def tensor(self, stored: StoredTensor) -> Iterator[Finding]:
        """Yields what one tensor shows."""
        yield from ()

    def finish(self) -> Iterator[Finding]:
        """Yields what all tensors show together."""
        yield from ()

    def facts(self) -> dict[str, str]:
        """Returns what the checkpoint is, by what is stated."""
        return {}

    def error(self, kind: str, where: str, problem: str, remedy: str = AGAIN) -> Finding:
        """Makes an error of this check."""
        return Finding(self.name, kind, Severity.ERROR, where, problem, remedy or AGAIN)

    def warning(self, kind: str, where: str, problem: str, remedy: str) -> Finding:
        """Makes a warning of this check."""
        return Finding(self.name, kind, Severity.WARNING, where, problem, remedy)


CHECKS: dict[str, type[Check]] = {}
"""Registered checks by name. Importing `compress.doctor.checks` registers those of that package."""
Kind = TypeVar("Kind", bound=type[Check])


def register(check: Kind) -> Kind:
    """Registers a check under its name. Raises ValueError for a name that is taken."""
    if check.name in CHECKS:
        raise ValueError(f"a check {check.name!r} is registered already")
    CHECKS[check.name] = check
    return check

"""The interface of a check, and the registry of checks.

A check is one file in `compress/doctor/checks` with a class derived from `Check` and decorated with
`CHECKS.register()`. An examination creates one instance of each: `start` reads files and headers, `tensor` is called
for every tensor, `finish` evaluates all tensors together. Every tensor is read once, whatever the number of checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from compress.common.registry import Registry
from compress.doctor.findings import Finding, Severity
from compress.doctor.view import StoredTensor, View

AGAIN = "Download or write this checkpoint again"
"""Remedy of damage that only the original file repairs."""


class Check:
    """One examination of one checkpoint."""

    name: ClassVar[str]

    def __init__(self, view: View) -> None:
        self.view = view

    def start(self) -> Iterator[Finding]:
        """Yields findings from files and headers."""
        yield from ()

    def tensor(self, stored: StoredTensor) -> Iterator[Finding]:
        """Yields findings from one tensor."""
        yield from ()

    def finish(self) -> Iterator[Finding]:
        """Yields findings from all tensors together."""
        yield from ()

    def facts(self) -> dict[str, str]:
        """Returns descriptions of the checkpoint by label."""
        return {}

    def error(self, kind: str, where: str, problem: str, remedy: str = AGAIN) -> Finding:
        """Creates a finding of severity error."""
        return Finding(self.name, kind, Severity.ERROR, where, problem, remedy or AGAIN)

    def warning(self, kind: str, where: str, problem: str, remedy: str) -> Finding:
        """Creates a finding of severity warning."""
        return Finding(self.name, kind, Severity.WARNING, where, problem, remedy)


CHECKS: Registry[type[Check]] = Registry("check", "compress.doctor.checks")

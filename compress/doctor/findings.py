"""Findings of an examination, and the report that holds them. Free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """Weight of a finding: an error means wrong results or a refusal, a warning deserves a look."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a checkpoint.

    Attributes:
        check: name of the check that found it.
        kind: what alike findings share: `dead-scales`.
        severity: error or warning.
        where: file, tensor or module.
        problem: what was wrong, with the numbers.
        remedy: the command or step that mends it.
    """

    check: str
    kind: str
    severity: Severity
    where: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of an examination.

    Attributes:
        path: the folder or file as it was named.
        facts: what the checkpoint is, by what is stated: container, weight forms, engines that load it.
        findings: errors first, then by check.
    """

    path: str
    facts: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def num_errors(self) -> int:
        return sum(each.severity is Severity.ERROR for each in self.findings)

    @property
    def num_warnings(self) -> int:
        return len(self.findings) - self.num_errors

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings do not count."""
        return self.num_errors == 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        counts = {"ok": self.ok, "errors": self.num_errors, "warnings": self.num_warnings}
        return {"path": self.path, **counts, "facts": self.facts, "findings": [asdict(each) for each in self.findings]}


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return findings without repetitions, errors first, then as they were found."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: each.severity is not Severity.ERROR))

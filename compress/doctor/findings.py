"""Findings of a diagnosis and the report that holds them. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """Severity of a finding: an error causes wrong results or fails to load, a warning may be intended."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect of a checkpoint. `kind`: identifier that similar findings share, such as `dead-scales`."""

    check: str
    kind: str
    severity: Severity
    where: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of examining a checkpoint.

    Attributes:
        facts: descriptions by label: container, weight forms, engines that load it.
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
        """Whether there are no errors; warnings are ignored."""
        return self.num_errors == 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        counts = {"ok": self.ok, "errors": self.num_errors, "warnings": self.num_warnings}
        return {"path": self.path, **counts, "facts": self.facts, "findings": [asdict(each) for each in self.findings]}


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Returns findings without repetitions, errors first, then as they were found."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: each.severity is not Severity.ERROR))

"""Examination of a checkpoint by all registered checks: one tensor in memory at a time, tolerant of damage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from compress.checkpoint.formats.readers import LOADED_BY, REFUSED_BY, UNKNOWN
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.locate import shown_name
from compress.checkpoint.reader import NONSENSE, PackedCheckpoint
from compress.common.errors import ToolkitError
from compress.doctor.base import AGAIN, CHECKS
from compress.doctor.findings import Diagnosis, Finding, Severity, in_order
from compress.doctor.view import StoredTensor, View

DAMAGE = (ToolkitError, OSError, *NONSENSE)
"""Errors that a damaged checkpoint causes."""
Progress = Callable[[str, int, int], None]
"""Callback with the name of the current tensor, its number and the total."""


def examine(path: Path, against: Path | None = None, on_progress: Progress | None = None) -> Diagnosis:
    """Examines a checkpoint folder or GGUF file. Raises CheckpointError: the folder or file does not exist, or
    `against` cannot be opened."""
    source = folder_of(against) if against else None
    try:
        folder = folder_of(path)
    except ToolkitError as error:
        if not path.is_file():
            raise
        return Diagnosis(str(path), {}, (_refused("files", path.name, error),))
    findings: list[Finding] = []
    facts = _collect(View(folder if folder.name else folder.absolute(), source), findings, on_progress)
    if any(each.severity is Severity.ERROR for each in findings):
        facts = {name: fact for name, fact in facts.items() if name not in (LOADED_BY, REFUSED_BY, UNKNOWN)}
    return Diagnosis(shown_name(path), facts, in_order(findings))


def _collect(view: View, findings: list[Finding], on_progress: Progress | None) -> dict[str, str]:
    """Adds the findings of all checks to `findings`, and returns their facts."""
    made, facts, where = [check(view) for check in CHECKS.values()], dict[str, str](), view.path.name
    for check in made:
        findings += _guarded(check.name, where, check.start)
    for stored in _tensors(view, findings, on_progress):
        for check in made:
            findings += _guarded(check.name, stored.name, partial(check.tensor, stored))
    for check in made:
        findings += _guarded(check.name, where, check.finish)
        try:
            facts |= check.facts()
        except DAMAGE as error:
            findings.append(_refused(check.name, where, error))
    return facts


def _guarded(name: str, where: str, ask: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields findings; an exception that damage causes becomes one more finding."""
    try:
        yield from ask()
    except DAMAGE as error:
        yield _refused(name, where, error)


def _refused(name: str, where: str, error: Exception) -> Finding:
    if isinstance(error, ToolkitError):
        return Finding(name, "unreadable", Severity.ERROR, where, error.problem, error.remedy or AGAIN)
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Finding(name, "unreadable", Severity.ERROR, where, f"cannot be checked: {said}", AGAIN)


def _tensors(view: View, findings: list[Finding], on_progress: Progress | None) -> Iterator[StoredTensor]:
    """Yields every readable tensor; unreadable tensors become findings."""
    packed = view.packed
    if packed is None:
        return
    names = [*((module, True) for module in packed.modules), *((name, False) for name in packed.dense_names())]
    for done, (name, is_packed) in enumerate(names, 1):
        if on_progress:
            on_progress(name, done, len(names))
        try:
            stored = _read(packed, name, is_packed)
        except DAMAGE as error:
            findings.append(_refused("tensors", name, error))
            continue
        yield stored
        packed.files.release()


def _read(packed: PackedCheckpoint, name: str, is_packed: bool) -> StoredTensor:
    if not is_packed:
        return StoredTensor(name, packed.tensor(name), False)
    weight, order = packed.in_groups(name)
    return StoredTensor(name, weight, True, order)

"""Weights against the source model: the relative error of every matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import ClassVar

from compress.checkpoint.config import HEAD, is_embedding
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights.base import Weight
from compress.doctor.base import Check, register
from compress.doctor.findings import Finding
from compress.doctor.view import StoredTensor, View

FAR, LEAST_ERROR = 3.0, 0.02
"""Thresholds of an outlier: ratio to the median error of the same form, and relative error."""
UNRELATED = 0.7
"""Relative error above which two matrices count as unrelated; that of two independent matrices is 1.41."""
QUANTIZE = "Quantize these layers again, or leave them dense with --ignore"


@register
class Against(Check):
    """Compares every matrix with that of the source model, if one is given."""

    name: ClassVar[str] = "against"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._errors: dict[str, list[tuple[str, float]]] = defaultdict(list)

    def tensor(self, stored: StoredTensor) -> Iterator[Finding]:
        source = self.view.source
        if source is None or len(stored.shape) != 2 or not (stored.is_packed or stored.name.endswith(".weight")):
            return
        module = stored.name if stored.is_packed else stored.name.removesuffix(".weight")
        theirs = _source_name(source, module)
        if theirs is None:
            problem = f"{source.path} has no such matrix"
            yield self.warning("not-in-source", module, problem, "Name the model that it was made from: --against")
        elif (shape := source.shape(theirs)) != stored.shape:
            problem = f"it is {stored.shape}, in {source.path} {shape}"
            yield self.error("shape", module, problem, "Name the model that it was made from: --against")
        else:
            form = str(stored.content.scheme) if isinstance(stored.content, Weight) else "dense"
            self._errors[form].append((module, relative_error(stored, source, theirs)))

    def finish(self) -> Iterator[Finding]:
        for form, found in self._errors.items():
            usual = median(error for _, error in found)
            if usual > UNRELATED:
                problem = f"the median relative error of {len(found)} {form} matrices is {usual:.3g}"
                remedy = "Name the model that it was made from: --against; rotated models cannot be compared"
                yield self.warning("unrelated", form, problem, remedy)
                continue
            for module, error in found:
                if error > max(FAR * usual, LEAST_ERROR) or math.isnan(error):
                    problem = (
                        f"its relative error is {error:.3g}, the median of {len(found)} {form} matrices {usual:.3g}"
                    )
                    yield self.error("large-error", module, problem, QUANTIZE)

    def facts(self) -> dict[str, str]:
        lines = [
            f"{form} {median(error for _, error in found):.4g} (largest {max(error for _, error in found):.4g})"
            for form, found in sorted(self._errors.items())
        ]
        return {"median relative error": ", ".join(lines)} if lines else {}


def _source_name(source: PackedCheckpoint, module: str) -> str | None:
    """The name of a matrix in the source, for a tied head that of the embedding; None where there is none."""
    if f"{module}.weight" in source.files or module in source.schemes:
        return module
    names = [name.removesuffix(".weight") for name in source.files.names()] if module == HEAD and source.tied else []
    return next(filter(is_embedding, names), None)


def relative_error(stored: StoredTensor, source: PackedCheckpoint, module: str) -> float:
    """Returns the Frobenius norm of the difference to the source's matrix, divided by that of the source's matrix."""
    content = source.weight(module)
    dense = StoredTensor(module, content, isinstance(content, Weight))
    squared, total = 0.0, 0.0
    for ours, theirs in zip(stored.panels(), dense.panels(), strict=True):
        squared += float((ours - theirs).double().square().sum())
        total += float(theirs.double().square().sum())
    source.files.release()
    return math.sqrt(squared / total) if total else math.sqrt(squared)

"""Weights against the source model: the relative error of every matrix, without the scales that smoothing folds in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from torch import Tensor

from compress.checkpoint.config import HEAD, is_embedding
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights.base import Weight
from compress.doctor.base import CHECKS, Check
from compress.doctor.findings import Finding
from compress.doctor.folded_scales import Folding, Pair, Products, foldings, norm_scale, pair_error
from compress.doctor.view import StoredTensor, View, listed

FAR, LEAST_ERROR = 3.0, 0.02
"""Thresholds of an outlier: ratio to the median error of the same form, and relative error."""
UNRELATED = 0.3
"""Cosine of two matrices below which they count as unrelated; those of pruned and factorized ones are far above."""
QUANTIZE = "Quantize these layers again, or leave them dense with --ignore"


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of one matrix, or of two with common scales, with the source. `similarity`: cosine of the matrix and
    its source; 1 for two, each of which has its own."""

    names: tuple[str, ...]
    error: float
    similarity: float = 1.0


@CHECKS.register()
class Against(Check):
    """Compares every matrix with that of the source model, if one is given."""

    name: ClassVar[str] = "against"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._matrices: dict[str, list[Compared]] = defaultdict(list)
        self._pairs: dict[str, list[Compared]] = defaultdict(list)
        self._waiting: dict[str, tuple[str, Products]] = {}
        self._foldings = foldings(view.spec) if view.source and view.spec else {}

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
            content = source.weight(theirs)
            self._compare(module, stored, StoredTensor(theirs, content, isinstance(content, Weight)))
            source.files.release()

    def _compare(self, module: str, ours: StoredTensor, theirs: StoredTensor) -> None:
        form = str(ours.content.scheme) if isinstance(ours.content, Weight) else "dense"
        folding = self._foldings.get(module, Folding())
        panels = zip(ours.panels(), theirs.panels(), strict=True)
        products = Products.of(panels, self._norm_scale(folding), folding.fitted)
        self._matrices[form].append(Compared((module,), products.relative_error, products.similarity))
        if folding.pair is not None:
            self._waiting[module] = form, products
            self._compare_pair(folding.pair)

    def _norm_scale(self, folding: Folding) -> Tensor | None:
        packed, source, name = self.view.packed, self.view.source, f"{folding.norm}.weight"
        if packed is None or source is None or name not in packed.files or name not in source.files:
            return None
        return norm_scale(packed.tensor(name), source.tensor(name), folding.offset)

    def _compare_pair(self, pair: Pair) -> None:
        """Compares the products of a pair as soon as both of its linears have been read."""
        if {pair.rows, pair.columns} <= self._waiting.keys():
            (above, rows), (below, columns) = self._waiting.pop(pair.rows), self._waiting.pop(pair.columns)
            error = pair_error(rows, columns, pair.head_dim)
            self._pairs[f"{above}, {below}"].append(Compared((pair.rows, pair.columns), error))

    def finish(self) -> Iterator[Finding]:
        unrelated = {form for form, found in self._matrices.items() if _similarity(found) < UNRELATED}
        if unrelated:
            count = sum(len(self._matrices[form]) for form in unrelated)
            lowest = min(_similarity(self._matrices[form]) for form in unrelated)
            problem = (
                f"{count} matrices ({listed(sorted(unrelated))}) are not compared: the median cosine with those of "
            )
            problem += f"the source is {lowest:.2g}"
            remedy = "Name the model that it was made from: --against; rotated models cannot be compared"
            yield self.warning("unrelated", self.view.path.name, problem, remedy)
        accused = set[str]()
        for form, found in self._matrices.items():
            for each in _outliers(found) if form not in unrelated else ():
                accused.update(each.names)
                problem = f"its relative error is {each.error:.3g}, the median of {len(found)} {form} matrices "
                yield self.error("large-error", each.names[0], f"{problem}{_usual(found):.3g}", QUANTIZE)
        for forms, found in self._pairs.items():
            for each in _outliers(found):
                if accused.isdisjoint(each.names):
                    problem = f"together with {each.names[1]} its relative error is {each.error:.3g}, the median of "
                    problem += f"{len(found)} such pairs ({forms}) {_usual(found):.3g}"
                    yield self.error("large-error", each.names[0], problem, QUANTIZE)

    def facts(self) -> dict[str, str]:
        lines = [
            f"{form} {_usual(found):.4g} (largest {max(each.error for each in found):.4g})"
            for form, found in sorted(self._matrices.items())
        ]
        return {"median relative error": ", ".join(lines)} if lines else {}


def _usual(found: list[Compared]) -> float:
    return median(each.error for each in found)


def _similarity(found: list[Compared]) -> float:
    return median(each.similarity for each in found)


def _outliers(found: list[Compared]) -> list[Compared]:
    limit = max(FAR * _usual(found), LEAST_ERROR)
    return [each for each in found if each.error > limit or math.isnan(each.error) or each.similarity < UNRELATED]


def _source_name(source: PackedCheckpoint, module: str) -> str | None:
    """The name of a matrix in the source, for a tied head that of the embedding; None where there is none."""
    if f"{module}.weight" in source.files or module in source.schemes:
        return module
    names = [name.removesuffix(".weight") for name in source.files.names()] if module == HEAD and source.tied else []
    return next(filter(is_embedding, names), None)

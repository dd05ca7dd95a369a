"""What a plan costs without a gain: layers that get no smaller or slower, and work that is known to hurt other work."""

from __future__ import annotations

from collections.abc import Iterable

from compress.pipeline.factor_notes import factor_notes
from compress.plan import PlanRow
from compress.recipe import Recipe


def cost_notes(recipe: Recipe, rows: Iterable[PlanRow]) -> list[str]:
    """One sentence for each, to be read before anything runs."""
    rows = list(rows)
    return [*_larger_notes(rows), *factor_notes(rows), *_rotation_notes(recipe, rows)]


def _larger_notes(rows: Iterable[PlanRow]) -> list[str]:
    """Biases and norms are not weights: only rows with a scheme are expected to shrink."""
    larger = [row for row in rows if row.assignment and row.assignment.scheme and row.bytes_after >= row.bytes_before]
    if not larger:
        return []
    worst = max(larger, key=lambda row: row.bytes_after / row.bytes_before)
    return [
        f"{len(larger)} tensors would get no smaller (e.g. {worst.tensor}: {worst.bytes_before:,} bytes before, "
        f"{worst.bytes_after:,} after as {worst.assignment}): use fewer bits, larger groups or fewer outlier columns, "
        "or leave them out"
    ]


def _rotation_notes(recipe: Recipe, rows: Iterable[PlanRow]) -> list[str]:
    if recipe.rotate is None or not any(row.assignment and row.assignment.pruning for row in rows):
        return []
    return [
        "a rotation spreads every weight over its whole row before it is pruned, so that few are small: compare with "
        "the same recipe without `rotate`"
    ]

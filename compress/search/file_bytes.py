"""Bytes of a checkpoint in which units have their forms: those of each unit, and those of everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compress.assignment import Assignment
from compress.pipeline.planning import packed_bytes
from compress.plan import Plan, shape_bytes
from compress.search.fit import assignments_of
from compress.search.form import Form
from compress.search.units import Unit

# A tensor's entry in the header of a weight file beside its name.
_ENTRY_BYTES = 128


def unit_bytes(plan: Plan, unit: Unit, form: Form, method: str) -> int:
    """Of a unit's weights: values and their places, both factors, scales, zero points.

    Args:
        plan: of the same model, whatever its recipe.
        method: how integers are rounded.
    """
    if form.is_dense:
        dense = {f"{module}.weight" for module in unit.modules}
        return sum(row.bytes_before for row in plan.rows if row.tensor in dense)
    assignments = assignments_of(unit, form, method)
    shapes = zip(unit.modules, unit.shapes, strict=True)
    packed = sum(packed_bytes(assignments[module], shape, plan.scale_dtype) for module, shape in shapes)
    return packed - _shape_bytes(assignments)


def fixed_bytes(plan: Plan, menus: Mapping[Unit, Sequence[Form]], method_of: Callable[[Unit], str]) -> int:
    """At most how many all else takes: other tensors, headers, and the shapes beside packed weights."""
    searched = {f"{module}.weight" for unit in menus for module in unit.modules}
    others = sum(row.bytes_after for row in plan.rows if row.tensor not in searched)
    header = sum(_ENTRY_BYTES + len(row.tensor) for row in plan.rows if row.bytes_after)
    shapes = 0
    for unit, menu in menus.items():
        more = max(map(_entries, menu)) - 1
        header += sum(more * (_ENTRY_BYTES + len(module)) for module in unit.modules)
        shapes += max(_shape_bytes(assignments_of(unit, form, method_of(unit))) for form in menu)
    return others + header + shapes


def _entries(form: Form) -> int:
    """Tensors in the file: values, or codes, scales, shapes and zero points; places beside them; two factors of all."""
    tensors = 1 if form.scheme is None else 3 if form.scheme.symmetric else 4
    return (tensors + bool(form.pattern)) * (2 if form.factorizing else 1)


def _shape_bytes(assignments: Mapping[str, Assignment]) -> int:
    """Of the shapes beside packed weights, which are no weights."""
    return sum(shape_bytes(each.scheme) for each in assignments.values() if each.scheme)

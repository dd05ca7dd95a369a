"""Which forms fit a unit, and what they make of it: decided as a recipe's run decides it."""

from __future__ import annotations

from collections.abc import Sequence

from compress.assignment import Assignment
from compress.checkpoint.errors import SchemeError
from compress.checkpoint.formats import native
from compress.pipeline.assign import assign
from compress.ranks import ALIGNMENT, largest_rank
from compress.search.form import Form
from compress.search.units import Unit


def assignments_of(unit: Unit, form: Form, method: str) -> dict[str, Assignment]:
    """What each linear of a unit gets, by full name; empty where it stays dense.

    Args:
        method: how integers are rounded.

    Raises:
        SchemeError: the form does not fit: groups or pattern do not divide, or factors would be no smaller.
    """
    if form.factorizing and not all(largest_rank(*shape, ALIGNMENT) for shape in unit.shapes):
        raise SchemeError(f"factors of {unit.name} would be no smaller", "Leave low rank out")
    if form.is_dense:
        return {}
    shapes = dict(zip(unit.modules, unit.shapes, strict=True))
    assignments, _ = assign(form.stages(method, unit.modules), shapes, {})
    for module, each in assignments.items():
        if each.scheme is not None:
            native.check(each.scheme, shapes[module])
    return assignments


def menu_for(unit: Unit, menu: Sequence[Form], method: str) -> list[Form]:
    """The forms that fit a unit. Raises SchemeError when none does."""
    fitting = [form for form in menu if _fits(unit, form, method)]
    if not fitting:
        widths = ", ".join(str(columns) for _, columns in unit.shapes)
        raise SchemeError(f"nothing on the menu fits the {widths} inputs of {unit.name}", "Add w8 or w4 to --menu")
    return fitting


def _fits(unit: Unit, form: Form, method: str) -> bool:
    try:
        assignments_of(unit, form, method)
    except SchemeError:
        return False
    return True

"""Paths of fields at fault. The locations that pydantic reports also name forms of values, which no body has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

Path = tuple[str | int, ...]
NOT_IN_BODY = ("missing", "contradiction", "value_error")
"""Types of errors whose field may not be in the body."""


def most_specific(errors: Sequence[Mapping[str, Any]], body: Any) -> Mapping[str, Any]:
    """Returns the first error; if its value may have several forms, the error of the form that fits most of it."""
    *outer, last = errors[0]["loc"] or ("",)
    if not last or field_path(errors[0], body)[-1:] == (last,):
        return errors[0]
    same_value = (each for each in errors if list(each["loc"][: len(outer)]) == outer)
    return max(same_value, key=lambda each: len(each["loc"]))


def field_path(error: Mapping[str, Any], body: Any) -> Path:
    """Returns where a pydantic error is in the body, or which field the body lacks."""
    *outer, last = error["loc"] or ("",)
    if error["type"] in NOT_IN_BODY and isinstance(last, str):
        path = path_within(tuple(outer), body)
        if last and isinstance(reduce(lambda held, part: held[part], path, body), dict):
            return (*path, last)
    return path_within(error["loc"], body)


def path_within(location: Path, body: Any) -> Path:
    """Returns the most parts of a location that lead into a body, of equally many the later ones."""
    if not location:
        return ()
    part, rest = location[0], location[1:]
    without = path_within(rest, body)
    if not (part in body if isinstance(body, dict) else isinstance(body, list) and part in range(len(body))):
        return without
    path = (part, *path_within(rest, body[part]))
    return path if len(path) > len(without) else without

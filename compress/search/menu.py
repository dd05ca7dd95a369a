"""Schemes as words: `w4g128`. Free of torch."""

from __future__ import annotations

import re

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import Scheme

DEFAULT_MENU = "w2g128,w2g64,w3g128,w3g64,w4g128,w4g32,w5g128,w6g128,w8"
_WORD = re.compile(r"w(\d)(?:g(\d+))?(asym)?")


def parse_menu(text: str) -> tuple[Scheme, ...]:
    """Schemes from `w2g64,w3g128,w8`, each once: width, columns that share a scale (none: all of a row), and `asym` for
    stored zero points.

    Raises:
        RecipeError: a word that means no scheme, or fewer than two schemes.
        SchemeError: a width or group that no scheme has.
    """
    schemes = dict.fromkeys(_scheme(word.strip()) for word in text.split(","))
    if len(schemes) < 2:
        raise RecipeError(f"a menu of {len(schemes)} leaves nothing to choose", f"Use --menu {DEFAULT_MENU}")
    return tuple(schemes)


def word(scheme: Scheme) -> str:
    """The inverse of `parse_menu`, for one scheme."""
    group = f"g{scheme.group_size}" if scheme.group_size else ""
    return f"w{scheme.bits}{group}{'' if scheme.symmetric else 'asym'}"


def _scheme(text: str) -> Scheme:
    found = _WORD.fullmatch(text)
    if found is None:
        raise RecipeError(f"{text!r} is no scheme", "Write a width and a group size: w4g128, w3g64asym, w8")
    bits, group, asymmetric = found.groups()
    return Scheme(int(bits), int(group) if group else None, asymmetric is None)

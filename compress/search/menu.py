"""Menus as users write them: `w3g64,w4g128,2:4w4g128,asvd0.8`. Free of torch."""

from __future__ import annotations

import re

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.search.form import RANK_WORDS, Form

DEFAULT_MENU = "w2g128,w2g64,w3g128,w3g64,w4g128,w4g32,w5g128,w6g128,w8"
DENSE = "dense"
_WORD = re.compile(
    rf"(?P<pattern>\d+:\d)?(?:(?P<method>{'|'.join(RANK_WORDS)})(?P<keep>\d*\.\d+|\d+))?"
    r"(?:w(?P<bits>\d)(?:g(?P<group>\d+))?(?P<asym>asym)?)?"
)


def parse_menu(text: str) -> tuple[Form, ...]:
    """Forms from `w2g64,2:4w4g128,rank0.8`, each once. A word says, in this order and each only if wanted: an N:M
    pattern, or a share of the weights that factors keep (`rank` by SVD-LLM, `asvd`, `svd`); then the width, the columns
    that share a scale (none: all of a row), and `asym` for stored zero points. `dense` leaves layers as they are.

    Raises:
        RecipeError: a word that means nothing, or fewer than two forms.
        SchemeError: a width, group or pattern that no scheme has.
    """
    forms = dict.fromkeys(_form(word.strip()) for word in text.split(","))
    if len(forms) < 2:
        raise RecipeError(f"a menu of {len(forms)} leaves nothing to choose", f"Use --menu {DEFAULT_MENU}")
    return tuple(forms)


def _form(word: str) -> Form:
    if word == DENSE:
        return Form()
    found = _WORD.fullmatch(word)
    if not word or found is None:
        raise RecipeError(
            f"{word!r} is nothing a layer can become", "Write w4g128, w8, 2:4w4g128, rank0.8 or asvd0.8w8"
        )
    bits, group = found["bits"], found["group"]
    return Form(
        Scheme(int(bits), int(group) if group else None, found["asym"] is None) if bits else None,
        Sparsity.parse(found["pattern"]) if found["pattern"] else None,
        RANK_WORDS.get(found["method"]),
        float(found["keep"] or 1),
    )

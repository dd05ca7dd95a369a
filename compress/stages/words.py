"""Words a user may have meant."""

from __future__ import annotations

from difflib import get_close_matches


def nearest(wanted: str, known: tuple[str, ...], what: str) -> str:
    """A remedy: the nearest known word, if one is near, and all of them."""
    near = get_close_matches(wanted, known, n=1, cutoff=0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}{what}: {', '.join(known)}"

"""Parameters whose combinations are too many to try at every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], at_once: int = 2) -> list[Any]:
    """Every combination of values, one of each axis. Those that it takes to see every pair of values of two axes, or
    every value where one is to be seen `at_once`, are quick; the rest are marked slow."""
    everything = list(product(*(range(len(axis)) for axis in axes)))
    quick = set(_few(everything, at_once))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, chosen, strict=True)),
            marks=() if chosen in quick else pytest.mark.slow,
        )
        for chosen in everything
    ]


def _few(everything: Sequence[tuple[int, ...]], at_once: int) -> Iterator[tuple[int, ...]]:
    """Greedily: next comes a combination that shows the most of what was not seen yet."""
    shown = {chosen: set(combinations(enumerate(chosen), at_once)) for chosen in everything}
    unseen = set().union(*shown.values())
    while unseen:
        best = max(everything, key=lambda chosen: len(shown[chosen] & unseen))
        unseen -= shown[best]
        yield best

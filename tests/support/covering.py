"""Parameters whose combinations are too many for the quick tier."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

SETTLED = ("full", "slow", "every_combination")


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of one value per axis. A few that show every value once are quick; the rest are marked full."""
    everything = list(product(*(range(len(axis)) for axis in axes)))
    quick = set(_few([tuple(enumerate(chosen)) for chosen in everything]))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, chosen, strict=True)),
            marks=() if tuple(enumerate(chosen)) in quick else pytest.mark.full,
        )
        for chosen in everything
    ]


def sample(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """All values; only the first `quick` are in the quick tier."""
    return [pytest.param(value, marks=() if i < quick else pytest.mark.full) for i, value in enumerate(values)]


def mark_products(items: Iterable[pytest.Item]) -> None:
    """Does the same to stacked parametrizations and parametrized fixtures: marks the cases of each test full that show
    no value that another quick case shows. Tests marked `every_combination` keep all."""
    cases = defaultdict(list)
    for item in items:
        values = _values(item)
        if len(values) > 1 and not any(item.get_closest_marker(name) for name in SETTLED):
            cases[item.nodeid.partition("[")[0]].append((values, item))
    for group in cases.values():
        quick = set(_few([values for values, _ in group]))
        for values, item in group:
            if values not in quick:
                item.add_marker(pytest.mark.full)


def _values(item: pytest.Item) -> tuple[Hashable, ...]:
    """One per parametrization: its arguments and the identities of their values."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = [tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names) for names in together]
    axes += [(name,) for name in params if not any(name in axis for axis in axes)]
    return tuple((axis, tuple(id(params[name]) for name in axis)) for axis in axes)


def _few(everything: Sequence[tuple[Hashable, ...]]) -> Iterator[tuple[Hashable, ...]]:
    """Greedily: next comes the combination that shows the most values not seen yet."""
    unseen = set().union(*everything)
    while unseen:
        best = max(everything, key=lambda values: len(unseen.intersection(values)))
        unseen.difference_update(best)
        yield best

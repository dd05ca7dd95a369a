"""Mixtures of calibration texts: their notation, and the number of sequences of each part. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compress.common.errors import DataError
from compress.common.files import in_home

_EXAMPLE = "Write --calibration bundled:0.5,chats.jsonl:0.5"


_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Part:
    """One text of a mixture. Raises DataError: a weight that is not a number from 1e-9 to 1e9. `weight`: its share of
    the tokens, relative to the weights of the other parts."""

    source: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 1 / _LARGEST <= self.weight <= _LARGEST:
            raise DataError(f"the weight {self.weight:g} of {self.source} is not from 1e-9 to 1e9", _EXAMPLE)
        if not self.source:
            raise DataError("a calibration text has no name", _EXAMPLE)


def parse_parts(spec: str) -> tuple[Part, ...]:
    """Parses `bundled:0.5,chats.jsonl:0.5`. Without a comma it is one source; all parts have weights, or none has.

    An existing path is one source even if it has commas and colons. Raises DataError: an empty part, a weight that is
    not a positive number, weights on some parts only, a source twice.
    """
    if "," not in spec or in_home(spec).exists():
        return (Part(spec),)
    pairs = [_split(item.strip()) for item in spec.split(",")]
    weighted = sum(weight is not None for _, weight in pairs)
    if weighted not in (0, len(pairs)):
        bare = next(source for source, weight in pairs if weight is None)
        raise DataError(f"{bare!r} has no weight and other parts of {spec!r} have one", _EXAMPLE)
    return check_parts(Part(source, 1.0 if weight is None else weight) for source, weight in pairs)


def check_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts of a mixture. Raises DataError when there are none, or one is named twice."""
    checked = tuple(parts)
    if not checked:
        raise DataError("the calibration mixture has no parts", _EXAMPLE)
    names = [part.source for part in checked]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{twice} is named twice in the calibration mixture", "Add its weights and name it once")
    return checked


def _split(item: str) -> tuple[str, float | None]:
    """Splits source and weight; the text after the last colon is a weight if it is a number."""
    source, colon, weight = item.rpartition(":")
    if not colon or in_home(item).exists():
        return item, None
    try:
        return source, float(weight)
    except ValueError:
        return item, None


def share_out(parts: Sequence[Part], samples: int) -> list[int]:
    """Returns the number of sequences of each part: in proportion to the weights, `samples` in all (largest remainder).
    Raises DataError: too few samples to give every part one."""
    total = sum(part.weight for part in parts)
    exact = [samples * part.weight / total for part in parts]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: samples - sum(counts)]:
        counts[index] += 1
    if 0 in counts:
        least = parts[counts.index(0)]
        needed = math.ceil(total / min(part.weight for part in parts))
        raise DataError(
            f"{least.source} gets none of {samples} calibration sequences", f"Use --num-calibration-samples {needed}"
        )
    return counts

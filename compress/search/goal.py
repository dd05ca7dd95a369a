"""What a search aims at. Free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Goal:
    """The best quality within a size, or the least size within a loss of quality: one of the three.

    Attributes:
        bits_per_weight: of the layers searched, scales included.
        size: bytes of the weight files.
        kl: mean divergence from the dense model as the finished checkpoint is measured, in nats.

    Raises:
        RecipeError: none or several are given, or one is not a positive number.
    """

    bits_per_weight: float | None = None
    size: int | None = None
    kl: float | None = None

    def __post_init__(self) -> None:
        given = [each for each in (self.bits_per_weight, self.size, self.kl) if each is not None]
        if len(given) != 1:
            raise RecipeError(
                f"a search has one target, and {len(given)} are given", "Use --target-bpw, --target-size or --max-kl"
            )
        if not 0 < given[0] < float("inf"):
            raise RecipeError(f"a target of {given[0]} means nothing", "Use e.g. --target-bpw 3.5")

    @property
    def name(self) -> str:
        """A short one, for recipes and reports."""
        if self.kl is not None:
            return f"search-kl{self.kl:g}"
        return f"search-{self.size / 1e6:g}MB" if self.size is not None else f"search-{self.bits_per_weight:g}bpw"

    def __str__(self) -> str:
        if self.kl is not None:
            return f"KL at most {self.kl:g}"
        if self.size is not None:
            return f"at most {self.size / 1e6:,.2f} MB"
        return f"at most {self.bits_per_weight:g} bits per weight"


def parse_size(text: str) -> int:
    """Bytes from `5GB`, `800 MB`, `1.5GiB` or a plain number. Raises RecipeError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found.group(2).upper() not in _UNITS:
        raise RecipeError(f"{text!r} is no size", "Write a number and a unit: 5GB, 800MB, 1.5GiB")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])

"""Forms of weights, keys and values with their KL divergence on the demo model: rank of forms in `compress fit` and
`runtime memory`. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

from compress.checkpoint.scheme import GROUP_SIZES, Scheme
from compress.checkpoint.weights import Int, Nvfp4
from compress.common.errors import SchemeError


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Weight form of all linears in the blocks.

    Attributes:
        scheme: storage scheme; None for 16 bits.
        kl: KL divergence to dense weights, in nats per token.
    """

    scheme: Scheme | None
    kl: float

    @property
    def stage(self) -> dict[str, Any]:
        """Keys of a `quantize` stage."""
        if isinstance(self.scheme, Int):
            return {"method": "gptq", "bits": self.scheme.bits, "group_size": self.scheme.group_size or -1}
        return {"method": "gptq", "weights": self.scheme.word} if self.scheme else {}

    def __str__(self) -> str:
        return str(self.scheme) if self.scheme else "16 bits"


WEIGHTS = (
    WeightForm(None, 0.0),
    WeightForm(Int(8, 128), 0.0001),
    WeightForm(Nvfp4(), 0.0162),
    WeightForm(Int(4, 64), 0.0184),
    WeightForm(Int(4, 128), 0.0216),
    WeightForm(Int(3, 64), 0.0719),
    WeightForm(Int(2, 64), 0.3457),
)
"""Measured on the demo model with GPTQ, text `pydoc`: docs/choosing.md."""
KEYS = {"16bit": 0.0, "int8": 0.0006, "int4": 0.0262}
"""KL divergence of formats of the KV cache to 16 bits, measured on the demo model in windows of 2,048 tokens:
docs/measurements/forms.md."""
GRADES = {0.001: "negligible", 0.03: "small", 0.1: "considerable", math.inf: "large"}
"""Words for a loss, by the largest KL divergence that they mean: int8 keys, 4 bits, 3 bits, 2 bits."""


def grade(kl: float) -> str:
    """Returns a description of a loss: a word for it and its KL divergence."""
    word = next(word for most, word in GRADES.items() if kl <= most)
    return f"a {word} loss, KL {kl:.4f} on the demo model"


def weight_forms(columns: Set[int]) -> Iterator[WeightForm]:
    """Yields forms with groups that divide all these numbers of input columns, using smaller groups where necessary."""
    for form in WEIGHTS:
        schemes = [form.scheme]
        if isinstance(form.scheme, Int):
            widest = form.scheme.group_size or 0
            schemes = [replace(form.scheme, group_size=size) for size in reversed(GROUP_SIZES) if size <= widest]
        yield from [WeightForm(scheme, form.kl) for scheme in schemes if _divides(scheme, columns)][:1]


def _divides(scheme: Scheme | None, columns: Set[int]) -> bool:
    try:
        return scheme is None or all(scheme.stored_bits(1, count) for count in columns)
    except SchemeError:
        return False

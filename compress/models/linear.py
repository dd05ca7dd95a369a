"""A linear layer as it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix `[out_features, in_features]` and its bias, if it has one.

    Attributes:
        name: relative to the block; absolute in `ModelSpec.linears`.
        split: dimension that tensor parallelism divides: `columns` are output features (Megatron-LM,
            arXiv:1909.08053, section 3), `rows` input features, whose partial products are summed.
        is_inner: reads what another linear of its mixer gives, not what the mixer reads.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    split: Literal["columns", "rows"] = "columns"
    is_inner: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

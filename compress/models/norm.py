"""A norm as it is stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm (arXiv:1910.07467) over the last `size` channels, multiplied by its weight.

    Attributes:
        offset: added to the stored weight; 1 where checkpoints store the distance to 1.
        centered: the mean is subtracted first (LayerNorm, arXiv:1607.06450).
        bias: a bias is added last.
        in_float32: the weight multiplies before the result is rounded to the activation dtype.
        has_weight: false where nothing is multiplied.
        part: name of the weight inside of the norm.
    """

    name: str
    size: int
    eps: float
    offset: float = 0.0
    centered: bool = False
    bias: bool = False
    in_float32: bool = False
    has_weight: bool = True
    part: str = "weight"

    @property
    def tensor(self) -> str:
        """Name of its weight."""
        return f"{self.name}.{self.part}"

    @property
    def is_plain(self) -> bool:
        """Whether it is the root mean square norm of Llama."""
        return self == Norm(self.name, self.size, self.eps)

"""A norm as it is stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormShare:
    """Part of a rank in norms over channels of several ranks.

    Attributes:
        channels: of one norm, those of all ranks.
        index, count: of this norm, and of all norms over groups of channels next to each other.
        is_added: ranks sum up the squares of this one; False where those of an earlier rank are the same.
    """

    channels: int
    index: int = 0
    count: int = 1
    is_added: bool = True


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm (arXiv:1910.07467) over the last `size` channels, multiplied by its weight.

    Attributes:
        offset: added to the stored weight; 1 where checkpoints store the distance to 1.
        centered: the mean is subtracted first (LayerNorm, arXiv:1607.06450).
        in_float32: the weight multiplies before the result is rounded to the activation dtype.
        part: name of the weight inside of the norm.
        share: of a rank that has a part of the channels; None for all.
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
    share: NormShare | None = None

    @property
    def tensor(self) -> str:
        """Name of its weight."""
        return f"{self.name}.{self.part}"

    @property
    def is_plain(self) -> bool:
        """Whether it is the root mean square norm of Llama."""
        return self == Norm(self.name, self.size, self.eps)

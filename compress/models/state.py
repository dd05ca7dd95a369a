"""State of a sequence in a recurrent layer: tensors of fixed size in place of keys and values of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class StateField:
    """One tensor of the state of one sequence in one layer.

    Attributes:
        is_exact: kept in float32 at least, because every token changes it a little; else in the dtype of activations.
    """

    shape: tuple[int, ...]
    is_exact: bool = False

    def nbytes(self, itemsize: int) -> int:
        """Bytes, where activations take `itemsize` each."""
        return math.prod(self.shape) * (max(itemsize, FLOAT32) if self.is_exact else itemsize)

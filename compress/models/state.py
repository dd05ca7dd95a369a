"""State of a sequence in a recurrent layer: tensors of fixed size in place of keys and values of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class StateField:
    """One tensor of the state of one sequence in one layer.

    Attributes:
        is_exact: computed in float32 at least, because every token changes it a little, and kept so unless another
            dtype is asked for; else in the dtype of activations.
    """

    shape: tuple[int, ...]
    is_exact: bool = False

    def nbytes(self, itemsize: int, state_itemsize: int = FLOAT32) -> int:
        """Bytes, where activations take `itemsize` each, and exact states are kept in `state_itemsize`."""
        exact = max(itemsize, FLOAT32) if state_itemsize == FLOAT32 else state_itemsize
        return math.prod(self.shape) * (exact if self.is_exact else itemsize)

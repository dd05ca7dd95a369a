"""What is special about the first tokens of sequences when attention reads pages. Knows no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Front:
    """Tokens at the beginning of every sequence that are read in another way.

    Attributes:
        sinks: that are seen whatever the window, by the queries `moved [B * n, heads, D]`; 0 is none.
        exact: keys and values `[slots, count, kv_heads, D]` in the dtype of the query, in the place of the first
            `count` in the pages; None is none.
        slots: int64 `[B]`, of the exact ones of each sequence.
    """

    sinks: int = 0
    moved: Tensor | None = None
    exact: tuple[Tensor, Tensor] | None = None
    slots: Tensor | None = None


NO_FRONT = Front()

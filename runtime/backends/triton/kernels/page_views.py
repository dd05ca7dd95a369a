"""Where kernels find the keys and values of one layer. Knows no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme


@dataclass(frozen=True, slots=True)
class HeadPages:
    """Keys and values of one layer.

    Attributes:
        pages, scales: of keys and of values, `[blocks, block_size, kv_heads, ...]`; without scales the pages again.
        formats: of keys and of values, a name of `launch_attention.FORMS` each.
        turned: keys, and queries with them, are turned by a Hadamard matrix.
    """

    pages: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    formats: tuple[str, str]
    turned: bool


def layer_pages(tensors: Mapping[str, Tensor], scheme: KVCacheScheme, layer: int) -> HeadPages:
    """Those of one layer in a block memory, in the layouts of plain torch."""
    names = ("keys", "values") if scheme.is_exact else ("key_codes", "value_codes")
    beside = names if scheme.is_exact else ("key_scales", "value_scales")
    return HeadPages(
        (tensors[names[0]][layer], tensors[names[1]][layer]),
        (tensors[beside[0]][layer], tensors[beside[1]][layer]),
        (scheme.key_format, scheme.value_format),
        scheme.rotate,
    )


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

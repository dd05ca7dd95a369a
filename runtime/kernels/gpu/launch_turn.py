"""Grid and arguments of `turn_write`."""

from __future__ import annotations

from torch import Tensor

from runtime.kernels.gpu.head_pages import HeadPages
from runtime.kernels.gpu.launch_attention import FORMS
from runtime.kernels.gpu.launch_rows import product_arguments, product_constants
from runtime.kernels.gpu.turn import turn_write
from runtime.kernels.handover import Product


def write_turned(
    qkv: Product, head_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, slots: Tensor, into: HeadPages
) -> Tensor:
    """Stores keys and values of M tokens and gives their queries `[M, heads, D]`, in the basis of the keys.

    Args:
        qkv: of all heads side by side, `[M, (heads + 2 * kv_heads) * D]`.
        head_norm: RMSNorm weights `[heads + kv_heads, D]`, or None.
        cos, sin: `[M, 1, D]`, sine with its sign, in the dtype of the queries.
        slots: int64 `[M]`; nothing is stored for one below 0.
    """
    (tokens, _, head_dim), kv_heads = cos.shape, into.pages[0].shape[2]
    heads = qkv.num_rows // head_dim - 2 * kv_heads
    query = cos.new_empty(tokens, heads, head_dim)
    turn_write[(tokens, heads + 2 * kv_heads)](
        *product_arguments(qkv), query if head_norm is None else head_norm, cos, sin, slots, query,
        into.pages[0], into.scales[0], into.pages[1], into.scales[1], eps, tokens, qkv.parts.shape[2],
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROOT=head_dim**0.5, HEAD_NORM=head_norm is not None,
        TURNED=into.turned, KEY_FORM=FORMS[into.formats[0]], VALUE_FORM=FORMS[into.formats[1]],
        **product_constants(qkv), num_warps=1,
    )  # fmt: skip
    return query

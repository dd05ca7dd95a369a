"""SiLU(gate) * up between two products."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.rounding import rounded
from runtime.kernels.gpu.rows import product_at, store_row


@triton.jit(do_not_specialize=["M"])
def gate_rows(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, out_ptr, beside_ptr, M, N, K, num_sums,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, like: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Gate and up, side by side in a product of 2 K rows, to K inputs of the next one in a form. Rounds to `like` where
    `TorchOps` does: both, SiLU, and the product. Programs (token, block of inputs)."""
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    gate = product_at(
        part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, k, k < K, M, N,
        SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
    )  # fmt: skip
    up = product_at(
        part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, K + k, k < K, M, N,
        SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
    )  # fmt: skip
    active = rounded(gate / (1.0 + tl.exp(-gate)), like, INTERPRETED)
    gated = rounded(active * up, like, INTERPRETED)
    store_row(gated, m, first, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)

"""Residual stream and RMSNorm between two products, one program per token."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.rounding import rounded
from runtime.kernels.gpu.rows import product_at, store_row


@triton.jit(do_not_specialize=["M"])
def add_norm(
    hidden_ptr, part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, weight_ptr, out_ptr, beside_ptr,
    eps, M, N, K, num_sums,
    HAS_UPDATE: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    FORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Adds the product that the parts make to `hidden [M, K]` in place; its RMSNorm goes to the next product in a form.

    Rounds to 16 bits where `TorchOps` does: the product, the sum, the normalized row, and that times the weight. BLOCK
    is at least K.
    """
    m, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < K
    like = hidden_ptr.dtype.element_ty
    x = tl.load(hidden_ptr + m * K + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        update = product_at(
            part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, k, inside, M, N,
            SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
        )  # fmt: skip
        x = rounded(x + update, like, INTERPRETED)
        tl.store(hidden_ptr + m * K + k, x.to(like), mask=inside)
    weight = tl.load(weight_ptr + k, mask=inside, other=0.0).to(tl.float32)
    normed = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / K + eps), like, INTERPRETED)
    normed = rounded(normed * weight, like, INTERPRETED)
    store_row(normed, m, 0, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)

"""SiLU(gate) * up between two products."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.rounding import largest, rounded
from runtime.kernels.gpu.rows import FLOATS, LEVELS, level_scale, product_at, store_levels, store_row


@triton.jit
def gated_at(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, k, M, N, K,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, like: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Inputs `k` of token m in float32, of gate and up side by side in a product of 2 K rows. Rounds to `like` where
    `TorchOps` does: both, SiLU, and the product."""
    gate = product_at(
        part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, k, k < K, M, N,
        SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
    )  # fmt: skip
    up = product_at(
        part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, K + k, k < K, M, N,
        SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
    )  # fmt: skip
    active = rounded(gate / (1.0 + tl.exp(-gate)), like, INTERPRETED)
    return rounded(active * up, like, INTERPRETED)


@triton.jit(do_not_specialize=["M"])
def gate_rows(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, out_ptr, beside_ptr, M, N, K, num_sums,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, like: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`silu(gate) * up` as K inputs of the next product in a form. Programs (token, block of inputs).

    Levels need the scale of the whole row: one program for each token, which computes its row twice. A whole row would
    not fit in registers.
    """
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    lane = tl.arange(0, BLOCK)
    if FORM == LEVELS or FORM == FLOATS:
        peak = 0.0
        for start in tl.range(0, K, BLOCK):
            gated = gated_at(
                part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, start + lane, M, N, K,
                SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
            )  # fmt: skip
            peak = tl.maximum(peak, largest(gated))
        scale = level_scale(peak, FORM)
        for start in tl.range(0, K, BLOCK):
            gated = gated_at(
                part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, start + lane, M, N, K,
                SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
            )  # fmt: skip
            store_levels(gated, scale, m, start + lane, K, out_ptr, FORM)
        tl.store(beside_ptr + m, scale)
    else:
        gated = gated_at(
            part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, first + lane, M, N, K,
            SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
        )  # fmt: skip
        store_row(gated, m, first, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)

"""Grids and arguments of what stands between two products: tensors in, tensors out."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.fused_linear import (
    Q8_FLOAT,
    Q8_INT,
    ROWS,
    SUMS,
    ActivationLayout,
    FusedLinear,
    PartialSums,
    QuantizedInput,
)
from runtime.backends.triton.kernels.common import largest, nearest, rounded, to_fp8

FORM_ROWS, FORM_SUMS, FORM_LEVELS, FORM_FLOATS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Forms of an input, see `ActivationLayout`."""


@triton.jit
def product_at(
    product, m, n, inside,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, like: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Elements `n` of token m (int64) of a product (pointers to parts, bias, scales of tokens and of rows; M, N), whose
    parts `[SPLITS, M, N]` are added in order: rounded to `like`, given in float32. Zeros where not `inside`."""
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N = product
    total = tl.load(part_ptr + m * N + n, mask=inside, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + (split * M + m) * N + n, mask=inside, other=0)
    total = total.to(tl.float32)
    if SCALED:
        row_scale = tl.load(row_scale_ptr + n, mask=inside, other=0.0).to(tl.float32)
        total = total * row_scale * tl.load(token_scale_ptr + m)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    return rounded(total, like, INTERPRETED)


@triton.jit
def q8_scale(peak, FORM: tl.constexpr):
    """Scale of a token whose largest magnitude is `peak`, as `compress.checkpoint.weights.fp8` has it: that becomes
    127, or 448 where they are 8-bit floats."""
    return tl.div_rn(peak, 127.0 if FORM == FORM_LEVELS else 448.0)


@triton.jit
def store_q8(x, scale, m, k, K, out_ptr, FORM: tl.constexpr):
    """Stores inputs `k` of token m, given as 16-bit numbers in float32, quantized."""
    steps = tl.div_rn(x, tl.maximum(scale, 1.1754943508222875e-38))
    codes = nearest(steps) if FORM == FORM_LEVELS else to_fp8(steps)
    tl.store(out_ptr + m * K + k, codes.to(out_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def store_row(
    x, m, first, M, K, num_sums, out_ptr, beside_ptr,
    FORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores 16-bit numbers `x [BLOCK]` of token m, given in float32 with zeros beyond K, from input `first` on.

    Levels need the whole row in one block.
    """
    k = first + tl.arange(0, BLOCK)
    if FORM == FORM_LEVELS or FORM == FORM_FLOATS:
        scale = q8_scale(largest(x), FORM)
        store_q8(x, scale, m, k, K, out_ptr, FORM)
        tl.store(beside_ptr + m, scale)
    else:
        tl.store(out_ptr + m * K + k, x.to(out_ptr.dtype.element_ty), mask=k < K)
    if FORM == FORM_SUMS:
        sums = tl.sum(tl.reshape(x, (BLOCK // UNIT, UNIT)), 1)
        unit = first // UNIT + tl.arange(0, BLOCK // UNIT)
        tl.store(beside_ptr + unit * M + m, sums, mask=unit < num_sums)


@triton.jit(do_not_specialize=["M"])
def convert_input_kernel(
    x_ptr, out_ptr, beside_ptr, M, K, num_sums, FORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """`x [M, K]` in a form. Programs (token, block of inputs)."""
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    store_row(x, m, first, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)


@triton.jit(do_not_specialize=["M"])
def split_k_reduce_kernel(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, y_ptr, M, N, ROWS_OUT,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A product as rows `y [M, ROWS_OUT]` in their own dtype. Programs (token, block of outputs)."""
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    like = y_ptr.dtype.element_ty
    product = part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N
    y = product_at(product, m, n, n < ROWS_OUT, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
    tl.store(y_ptr + m * ROWS_OUT + n, y.to(like), mask=n < ROWS_OUT)


@triton.jit(do_not_specialize=["M"])
def add_rms_norm_kernel(
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
        product = part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N
        update = product_at(product, m, k, inside, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
        x = rounded(x + update, like, INTERPRETED)
        tl.store(hidden_ptr + m * K + k, x.to(like), mask=inside)
    weight = tl.load(weight_ptr + k, mask=inside, other=0.0).to(tl.float32)
    normed = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / K + eps), like, INTERPRETED)
    normed = rounded(normed * weight, like, INTERPRETED)
    store_row(normed, m, 0, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)


@triton.jit
def gated_at(
    product, m, k, K,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, like: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Inputs `k` of token m in float32, of gate and up side by side in a product of 2 K rows. Rounds to `like` where
    `TorchOps` does: both, SiLU, and the product."""
    gate = product_at(product, m, k, k < K, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
    up = product_at(product, m, K + k, k < K, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
    active = rounded(gate / (1.0 + tl.exp(-gate)), like, INTERPRETED)
    return rounded(active * up, like, INTERPRETED)


@triton.jit(do_not_specialize=["M"])
def silu_and_mul_kernel(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, out_ptr, beside_ptr, M, N, K, num_sums,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, like: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`silu(gate) * up` as K inputs of the next product in a form. Programs (token, block of inputs).

    Levels need the scale of the whole row: one program for each token, which computes its row twice. A whole row would
    not fit in registers.
    """
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    lane, product = tl.arange(0, BLOCK), (part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N)
    if FORM == FORM_LEVELS or FORM == FORM_FLOATS:
        peak = 0.0
        for start in tl.range(0, K, BLOCK):
            gated = gated_at(product, m, start + lane, K, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
            peak = tl.maximum(peak, largest(gated))
        scale = q8_scale(peak, FORM)
        for start in tl.range(0, K, BLOCK):
            gated = gated_at(product, m, start + lane, K, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
            store_q8(gated, scale, m, start + lane, K, out_ptr, FORM)
        tl.store(beside_ptr + m, scale)
    else:
        gated = gated_at(product, m, first + lane, K, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
        store_row(gated, m, first, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)


FORMS = {ROWS: 0, SUMS: 1, Q8_INT: 2, Q8_FLOAT: 3}
"""Layouts of an input by the numbers that kernels take."""
BLOCK = 1024
"""Numbers of one program where a row may be cut."""
GATED_BLOCK = 4096
"""Inputs of one step of a program that walks over a row of gates."""
TYPES = {torch.bfloat16: triton.language.bfloat16, torch.float16: triton.language.float16}


def convert_input(x: Tensor, form: ActivationLayout) -> QuantizedInput:
    """16-bit `x [M, K]` in a form; itself where nothing is to do."""
    x = x.contiguous()
    if form.kind == ROWS:
        return QuantizedInput(x)
    out = empty_input(x, len(x), x.shape[1], form)
    block, blocks = row_blocks(x.shape[1], form)
    convert_input_kernel[(len(x), blocks)](
        x, *input_pointers(out), *x.shape, form.num_sums,
        FORM=FORMS[form.kind], UNIT=form.unit, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip
    return out


def split_k_reduce(product: PartialSums, dtype: torch.dtype) -> Tensor:
    """A product as 16-bit rows `[M, N]`."""
    parts = product.parts
    if parts.dtype == dtype:
        return parts[0]
    y = parts.new_empty(parts.shape[1], product.num_rows, dtype=dtype)
    split_k_reduce_kernel[(len(y), triton.cdiv(product.num_rows, BLOCK))](
        *product_arguments(product), y, *parts.shape[1:], product.num_rows, **product_constants(product), BLOCK=BLOCK
    )
    return y


class PackedLinear(FusedLinear):
    """A linear that, called by itself, has a launch before and one behind its product."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, K] -> x W^T + bias [M, N]` in the dtype of `x`, bfloat16 or float16, with sums in 32 bits."""
        return split_k_reduce(self.product(convert_input(x, self.activation_layout(len(x)))), x.dtype)


def add_rms_norm(
    hidden: Tensor, update: PartialSums | None, weight: Tensor, eps: float, form: ActivationLayout
) -> QuantizedInput:
    """Adds `update [M, H]` to `hidden [M, H]` in place; gives the RMSNorm of that in a form."""
    (tokens, size), read = hidden.shape, update or PartialSums(hidden.unsqueeze(0), hidden.shape[1])
    out, block = empty_input(hidden, tokens, size, form), whole_row(size, form)
    add_rms_norm_kernel[(tokens,)](
        hidden, *product_arguments(read), weight, *input_pointers(out), eps, tokens, read.parts.shape[2], size,
        form.num_sums, HAS_UPDATE=update is not None, **product_constants(read),
        FORM=FORMS[form.kind], UNIT=form.unit, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip
    return out


def silu_and_mul(gate_up: PartialSums, form: ActivationLayout, dtype: torch.dtype) -> QuantizedInput:
    """`silu(gate) * up [M, I]` of both side by side, `[M, 2 * I]`, in a form; rounded to `dtype` on the way."""
    (_, tokens, width), size = gate_up.parts.shape, gate_up.num_rows // 2
    out = empty_input(gate_up.parts.new_empty(0, dtype=dtype), tokens, size, form)
    block, blocks = (GATED_BLOCK, 1) if form.kind in (Q8_INT, Q8_FLOAT) else row_blocks(size, form)
    silu_and_mul_kernel[(tokens, blocks)](
        *product_arguments(gate_up), *input_pointers(out), tokens, width, size, form.num_sums,
        **product_constants(gate_up), FORM=FORMS[form.kind], UNIT=form.unit, BLOCK=block, like=TYPES[dtype],
        num_warps=num_warps(2 * block),
    )  # fmt: skip
    return out


def empty_input(like: Tensor, tokens: int, inputs: int, form: ActivationLayout) -> QuantizedInput:
    """Room for an input `[tokens, inputs]`, on the device and in the dtype of `like`."""
    rows = like.new_empty(tokens, inputs, dtype={Q8_INT: torch.int8, Q8_FLOAT: torch.uint8}.get(form.kind, like.dtype))
    shapes = {SUMS: (form.num_sums, tokens), Q8_INT: (tokens,), Q8_FLOAT: (tokens,)}
    if form.kind == ROWS:
        return QuantizedInput(rows)
    return QuantizedInput(rows, like.new_empty(shapes[form.kind], dtype=torch.float32))


def input_pointers(out: QuantizedInput) -> tuple[Tensor, Tensor]:
    """Tensors that a kernel writes an input to. An unused argument must be a pointer, too."""
    return out.rows, out.rows if out.beside is None else out.beside


def product_arguments(product: PartialSums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of a kernel that reads partial sums: parts, bias and both scales."""
    parts, bias = product.parts, product.bias
    return parts, parts if bias is None else bias, *(product.scales or (parts, parts))


def product_constants(product: PartialSums) -> dict[str, Any]:
    """Compile-time constants of a kernel that reads partial sums."""
    return {
        "SPLITS": len(product.parts),
        "HAS_BIAS": product.bias is not None,
        "SCALED": product.scales is not None,
        "INTERPRETED": triton.knobs.runtime.interpret,
    }


def row_blocks(inputs: int, form: ActivationLayout) -> tuple[int, int]:
    """Numbers of one program, and programs that a row takes: quantization needs all of it."""
    if form.kind in (Q8_INT, Q8_FLOAT):
        return whole_row(inputs, form), 1
    return BLOCK, triton.cdiv(max(inputs, form.unit * form.num_sums), BLOCK)


def whole_row(inputs: int, form: ActivationLayout) -> int:
    """Numbers of a program that has a whole row: a power of two, with the zeros that sums count."""
    return triton.next_power_of_2(max(inputs, form.unit * form.num_sums))


def num_warps(block: int) -> int:
    """Up to 16 warps with 16 numbers for each thread or more."""
    return min(16, max(1, block // 512))

"""Grids and arguments of what stands between two products: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

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
    SumsForm,
)
from runtime.backends.triton.kernels.common import largest, nearest, rounded, to_fp8, wait_for_inputs
from runtime.backends.triton.launcher import BoundKernel, Launcher
from runtime.backends.triton.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.split_product import SplitProduct

FORM_ROWS, FORM_SUMS, FORM_LEVELS, FORM_FLOATS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Forms of an input, see `ActivationLayout`."""


@triton.jit
def product_at(
    product, m, n, inside,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, like: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Elements `n` of token m (int64) of a product (pointers to parts, bias, scales of tokens and of rows; M, N and the
    number of splits), whose parts `[splits, M, N]` are added in order: rounded to `like`, given in float32. Zeros where
    not `inside`. SPLITS is 1 or at least `splits`."""
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N, splits = product
    total = tl.load(part_ptr + m * N + n, mask=inside, other=0)
    count = n * 0 + splits  # one for each element: the interpreter combines no mask with a scalar
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + (split * M + m) * N + n, mask=inside & (count > split), other=0)
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


@Launcher
@triton.jit(do_not_specialize=["M"])
def convert_input_kernel(
    x_ptr, out_ptr, beside_ptr, M, K, num_sums, FORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    WAITS: tl.constexpr = False,
):  # fmt: skip
    """`x [M, K]` in a form. Programs (token, block of inputs)."""
    wait_for_inputs(WAITS)
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    store_row(x, m, first, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)


@Launcher
@triton.jit(do_not_specialize=["M", "splits"])
def split_k_reduce_kernel(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, y_ptr, M, N, splits, ROWS_OUT,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """A product as rows `y [M, ROWS_OUT]` in their own dtype. Programs (token, block of outputs)."""
    wait_for_inputs(WAITS)
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    like = y_ptr.dtype.element_ty
    product = part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N, splits
    y = product_at(product, m, n, n < ROWS_OUT, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
    tl.store(y_ptr + m * ROWS_OUT + n, y.to(like), mask=n < ROWS_OUT)


@Launcher
@triton.jit(do_not_specialize=["M", "splits"])
def add_rms_norm_kernel(
    hidden_ptr, part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, weight_ptr, out_ptr, beside_ptr,
    eps, M, N, splits, K, num_sums,
    HAS_UPDATE: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    FORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
    WAITS: tl.constexpr = False,
):  # fmt: skip
    """Adds the product that the parts make to `hidden [M, K]` in place; its RMSNorm goes to the next product in a form.

    Rounds to 16 bits where `TorchOps` does: the product, the sum, the normalized row, and that times the weight. BLOCK
    is at least K.
    """
    wait_for_inputs(WAITS)
    m, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < K
    like = hidden_ptr.dtype.element_ty
    x = tl.load(hidden_ptr + m * K + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        product = part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N, splits
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


@Launcher
@triton.jit(do_not_specialize=["M", "splits"])
def silu_and_mul_kernel(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, out_ptr, beside_ptr, M, N, splits, K, num_sums,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, like: tl.constexpr, INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """`silu(gate) * up` as K inputs of the next product in a form. Programs (token, block of inputs).

    Levels need the scale of the whole row: one program for each token, which computes its row twice. A whole row would
    not fit in registers.
    """
    wait_for_inputs(WAITS)
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    lane, product = tl.arange(0, BLOCK), (part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N, splits)
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
UNROLLED_SPLITS = (1, 4, 8, 16)
"""Parts that a kernel adds up with one build for all numbers up to each: those beyond the last part are not read."""
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
    tokens, size = x.shape
    out, (kernel, blocks) = empty_input(x, tokens, size, form, x.dtype), _convert(size, form)
    kernel((tokens, blocks), x, *input_pointers(out), tokens)
    return out


@cache
def _convert(size: int, form: ActivationLayout) -> tuple[BoundKernel, int]:
    block, blocks = row_blocks(size, form)
    return convert_input_kernel.bind(K=size, **form_constants(form, block), num_warps=num_warps(block)), blocks


def split_k_reduce(product: PartialSums, dtype: torch.dtype) -> Tensor:
    """A product as 16-bit rows `[M, N]`."""
    parts = product.parts
    if parts.dtype == dtype:
        return parts[0]
    (_, tokens, width), rows = parts.shape, product.num_rows
    y = parts.new_empty(tokens, rows, dtype=dtype)
    _reduce(product.form, width, rows)((tokens, cdiv(rows, BLOCK)), *product_arguments(product), y, tokens)
    return y


@cache
def _reduce(sums: SumsForm, width: int, rows: int) -> BoundKernel:
    return split_k_reduce_kernel.bind(N=width, ROWS_OUT=rows, **product_constants(sums), BLOCK=BLOCK)


class PackedLinear(FusedLinear):
    """A linear that, called by itself, has a launch before and one after its product."""

    @cached_property
    def _products(self) -> dict[Hashable, SplitProduct]:
        """Prepared launches, by the size of the step."""
        return {}

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout()

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, K] -> x W^T + bias [M, N]` in the dtype of `x`, bfloat16 or float16, with sums in 32 bits."""
        return split_k_reduce(self.product(convert_input(x, self.activation_layout(len(x)))), x.dtype)


def add_rms_norm(
    hidden: Tensor,
    update: PartialSums | None,
    weight: Tensor,
    eps: float,
    form: ActivationLayout,
    room: InputRoom | None = None,
) -> QuantizedInput:
    """Adds `update [M, H]` to `hidden [M, H]` in place; gives the RMSNorm of that in a form, in new memory or a
    room."""
    tokens, size = hidden.shape
    out = (room or InputRoom(hidden, tokens, hidden.dtype)).input(size, form)
    kernel = _norm(size, form, *((None, 0) if update is None else (update.form, update.parts.shape[2])))
    sums = () if update is None else product_arguments(update)
    kernel((tokens,), hidden, *sums, weight, *input_pointers(out), eps, tokens)
    return out


@cache
def _norm(size: int, form: ActivationLayout, sums: SumsForm | None, width: int) -> BoundKernel:
    block = whole_row(size, form)
    update = {"part_ptr": None} | product_constants(SumsForm()) if sums is None else product_constants(sums)
    return add_rms_norm_kernel.bind(
        N=width,
        K=size,
        HAS_UPDATE=sums is not None,
        **update,
        **form_constants(form, block),
        num_warps=num_warps(block),
    )


def silu_and_mul(
    gate_up: PartialSums, form: ActivationLayout, dtype: torch.dtype, room: InputRoom | None = None
) -> QuantizedInput:
    """`silu(gate) * up [M, I]` of both side by side, `[M, 2 * I]`, in a form, in new memory or a room; rounded to
    `dtype` on the way."""
    (_, tokens, width), size = gate_up.parts.shape, gate_up.num_rows // 2
    out = (room or InputRoom(gate_up.parts, tokens, dtype)).input(size, form)
    kernel, blocks = _gate(size, form, gate_up.form, width, dtype)
    kernel((tokens, blocks), *product_arguments(gate_up), *input_pointers(out), tokens)
    return out


@cache
def _gate(size: int, form: ActivationLayout, sums: SumsForm, width: int, dtype: torch.dtype) -> tuple[BoundKernel, int]:
    block, blocks = (GATED_BLOCK, 1) if form.kind in (Q8_INT, Q8_FLOAT) else row_blocks(size, form)
    kernel = silu_and_mul_kernel.bind(
        N=width, K=size, **product_constants(sums), **form_constants(form, block), like=TYPES[dtype],
        num_warps=num_warps(2 * block),
    )  # fmt: skip
    return kernel, blocks


class InputRoom:
    """Memory for the inputs of M tokens to products, one for each size and layout: who asks again overwrites it.

    Args:
        like: on the device.
        dtype: of numbers that are not quantized.
    """

    def __init__(self, like: Tensor, tokens: int, dtype: torch.dtype) -> None:
        self._like, self._tokens, self._dtype = like, tokens, dtype
        self._inputs: dict[tuple[int, ActivationLayout], QuantizedInput] = {}

    def input(self, inputs: int, form: ActivationLayout) -> QuantizedInput:
        """Room for an input `[M, inputs]` in a form."""
        found = self._inputs.get((inputs, form))
        if found is None:
            found = empty_input(self._like, self._tokens, inputs, form, self._dtype)
            self._inputs[inputs, form] = found
        return found


def empty_input(like: Tensor, tokens: int, inputs: int, form: ActivationLayout, dtype: torch.dtype) -> QuantizedInput:
    """Room for an input `[tokens, inputs]` of 16-bit numbers of a dtype, or of codes, on the device of `like`."""
    if form.kind == ROWS:
        return QuantizedInput(like.new_empty(tokens, inputs, dtype=dtype))
    if form.kind == SUMS:
        sums = like.new_empty(form.num_sums, tokens, dtype=torch.float32)
        return QuantizedInput(like.new_empty(tokens, inputs, dtype=dtype), sums)
    codes = torch.int8 if form.kind == Q8_INT else torch.uint8
    return QuantizedInput(like.new_empty(tokens, inputs, dtype=codes), like.new_empty(tokens, dtype=torch.float32))


def input_pointers(out: QuantizedInput) -> tuple[Tensor, ...]:
    """Tensors that a kernel writes an input to."""
    return (out.rows,) if out.beside is None else (out.rows, out.beside)


def form_constants(form: ActivationLayout, block: int) -> dict[str, Any]:
    """Arguments of a kernel that writes an input in a form, `block` numbers in a program."""
    beside = {"beside_ptr": None} if form.kind == ROWS else {}
    return beside | {"num_sums": form.num_sums, "FORM": FORMS[form.kind], "UNIT": form.unit, "BLOCK": block}


def product_arguments(product: PartialSums) -> tuple[Tensor, ...]:
    """Tensors that a kernel reads partial sums from: parts, bias and both scales, as far as they are there."""
    bias = () if product.bias is None else (product.bias,)
    return (product.parts, *bias, *(product.scales or ()))


def product_constants(sums: SumsForm) -> dict[str, Any]:
    """Arguments of a kernel that reads partial sums of a form; what is not there is None."""
    absent = [] if sums.has_bias else ["bias_ptr"]
    absent += [] if sums.has_scales else ["token_scale_ptr", "row_scale_ptr"]
    return dict.fromkeys(absent) | {
        "splits": sums.splits,
        "SPLITS": next(most for most in UNROLLED_SPLITS if sums.splits <= most),
        "HAS_BIAS": sums.has_bias,
        "SCALED": sums.has_scales,
        "INTERPRETED": triton.knobs.runtime.interpret,
    }


def row_blocks(inputs: int, form: ActivationLayout) -> tuple[int, int]:
    """Numbers of one program, and programs that a row takes: quantization needs all of it."""
    if form.kind in (Q8_INT, Q8_FLOAT):
        return whole_row(inputs, form), 1
    return BLOCK, cdiv(max(inputs, form.unit * form.num_sums), BLOCK)


def whole_row(inputs: int, form: ActivationLayout) -> int:
    """Numbers of a program that has a whole row: a power of two, with the zeros that sums count."""
    return next_power_of_2(max(inputs, form.unit * form.num_sums))


def num_warps(block: int) -> int:
    """Up to 16 warps with 16 numbers for each thread or more."""
    return min(16, max(1, block // 512))

"""Grids and arguments of what stands between two products: tensors in, tensors out."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from runtime.kernels.gpu.gate import gate_rows
from runtime.kernels.gpu.norm import add_norm
from runtime.kernels.gpu.rows import finish_rows, prepare_rows
from runtime.kernels.handover import FLOATS, LEVELS, ROWS, SUMS, InputForm, Prepared, Product

FORMS = {ROWS: 0, SUMS: 1, LEVELS: 2, FLOATS: 3}
"""Of an input, as the kernels know them."""
BLOCK = 1024
"""Numbers of one program where a row may be cut."""
GATED_BLOCK = 4096
"""Of a program that walks over a row of gates."""
TYPES = {torch.bfloat16: triton.language.bfloat16, torch.float16: triton.language.float16}


def prepared(x: Tensor, form: InputForm) -> Prepared:
    """16-bit `x [M, K]` in a form; itself where nothing is to do."""
    x = x.contiguous()
    if form.kind == ROWS:
        return Prepared(x)
    out = empty_input(x, len(x), x.shape[1], form)
    block, blocks = row_blocks(x.shape[1], form)
    prepare_rows[(len(x), blocks)](
        x, *input_arguments(out, form), FORM=FORMS[form.kind], UNIT=form.unit, BLOCK=block, num_warps=num_warps(block)
    )
    return out


def finish(product: Product, dtype: torch.dtype) -> Tensor:
    """A product as 16-bit rows `[M, N]`."""
    parts = product.parts
    if parts.dtype == dtype:
        return parts[0]
    y = parts.new_empty(parts.shape[1], product.num_rows, dtype=dtype)
    finish_rows[(len(y), triton.cdiv(product.num_rows, BLOCK))](
        *product_arguments(product), y, *parts.shape[1:], product.num_rows, **product_constants(product), BLOCK=BLOCK
    )
    return y


def norm(hidden: Tensor, update: Product | None, weight: Tensor, eps: float, form: InputForm) -> Prepared:
    """Adds `update [M, H]` to `hidden [M, H]` in place; gives the RMSNorm of that in a form."""
    (tokens, size), read = hidden.shape, update or Product(hidden.unsqueeze(0), hidden.shape[1])
    out, block = empty_input(hidden, tokens, size, form), whole_row(size, form)
    rows, beside, *_ = input_arguments(out, form)
    add_norm[(tokens,)](
        hidden, *product_arguments(read), weight, rows, beside, eps, tokens, read.parts.shape[2], size, form.num_sums,
        HAS_UPDATE=update is not None, **product_constants(read), FORM=FORMS[form.kind], UNIT=form.unit, BLOCK=block,
        num_warps=num_warps(block),
    )  # fmt: skip
    return out


def gate(gate_up: Product, form: InputForm, dtype: torch.dtype) -> Prepared:
    """`silu(gate) * up [M, I]` of both side by side, `[M, 2 * I]`, in a form; rounded to `dtype` on the way."""
    (_, tokens, width), size = gate_up.parts.shape, gate_up.num_rows // 2
    out = empty_input(gate_up.parts.new_empty(0, dtype=dtype), tokens, size, form)
    block, blocks = (GATED_BLOCK, 1) if form.kind in (LEVELS, FLOATS) else row_blocks(size, form)
    rows, beside, *_ = input_arguments(out, form)
    gate_rows[(tokens, blocks)](
        *product_arguments(gate_up), rows, beside, tokens, width, size, form.num_sums,
        **product_constants(gate_up), FORM=FORMS[form.kind], UNIT=form.unit, BLOCK=block, like=TYPES[dtype],
        num_warps=num_warps(2 * block),
    )  # fmt: skip
    return out


def empty_input(like: Tensor, tokens: int, inputs: int, form: InputForm) -> Prepared:
    """Room for an input `[tokens, inputs]`, on the device and in the dtype of `like`."""
    rows = like.new_empty(tokens, inputs, dtype={LEVELS: torch.int8, FLOATS: torch.uint8}.get(form.kind, like.dtype))
    shapes = {SUMS: (form.num_sums, tokens), LEVELS: (tokens,), FLOATS: (tokens,)}
    if form.kind == ROWS:
        return Prepared(rows)
    return Prepared(rows, like.new_empty(shapes[form.kind], dtype=torch.float32))


def input_arguments(out: Prepared, form: InputForm) -> tuple[Tensor, Tensor, int, int, int]:
    """Of a kernel that writes an input: both tensors, and sizes. An unused argument must still be a pointer."""
    return out.rows, out.rows if out.beside is None else out.beside, *out.rows.shape, form.num_sums


def product_arguments(product: Product) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a kernel that reads a product: parts, bias and both scales."""
    parts, bias = product.parts, product.bias
    return parts, parts if bias is None else bias, *(product.scales or (parts, parts))


def product_constants(product: Product) -> dict[str, Any]:
    """Of a kernel that reads a product: what it is compiled for."""
    return {
        "SPLITS": len(product.parts),
        "HAS_BIAS": product.bias is not None,
        "SCALED": product.scales is not None,
        "INTERPRETED": triton.knobs.runtime.interpret,
    }


def row_blocks(inputs: int, form: InputForm) -> tuple[int, int]:
    """Numbers of one program, and programs that a row takes: levels need all of it."""
    if form.kind in (LEVELS, FLOATS):
        return whole_row(inputs, form), 1
    return BLOCK, triton.cdiv(max(inputs, form.unit * form.num_sums), BLOCK)


def whole_row(inputs: int, form: InputForm) -> int:
    """Numbers of a program that has a whole row: a power of two, with the zeros that sums count."""
    return triton.next_power_of_2(max(inputs, form.unit * form.num_sums))


def num_warps(block: int) -> int:
    """Up to 16 warps with 16 numbers for each thread or more."""
    return min(16, max(1, block // 512))

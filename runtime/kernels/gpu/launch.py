"""Grids and arguments of the weight-only kernels: tensors in, tensors out."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from runtime.kernels.gpu.configs import EXPAND, NARROW, KernelConfig
from runtime.kernels.gpu.launch_rows import finish, prepared
from runtime.kernels.gpu.narrow import narrow_product
from runtime.kernels.gpu.packing import PlanedWeight, tile_inputs
from runtime.kernels.gpu.planes import unpack_instructions
from runtime.kernels.gpu.wide import expand, wide_product
from runtime.kernels.handover import SUMS, InputForm, Prepared, Product, finished

EXPANDED_ELEMENTS = 12 * 2**20
"""Weights that are dense at one time: 24 MB stay in the second-level cache of a large GPU."""
GROUP_M = 8


def multiply(x: Tensor, weight: PlanedWeight, bias: Tensor | None, config: KernelConfig) -> Tensor:
    """`x [M, K] -> x W^T + bias [M, N]` in the dtype of `x`, bfloat16 or float16."""
    return finish(product(prepared(x, input_form(weight, config)), weight, bias, config), x.dtype)


def input_form(weight: PlanedWeight, config: KernelConfig) -> InputForm:
    """What `product` takes: the narrow kernel reads sums of its input."""
    if config.kernel != NARROW:
        return InputForm()
    return InputForm(SUMS, weight.unit, len(weight.words) * tile_inputs(weight.bits) // weight.unit)


def product(x: Prepared, weight: PlanedWeight, bias: Tensor | None, config: KernelConfig) -> Product:
    """The product of an input in the form that `input_form` names."""
    if config.kernel == NARROW:
        return _narrow(x, weight, bias, config)
    return finished((_expanded if config.kernel == EXPAND else _wide)(x.rows, weight, bias, config))


def _narrow(x: Prepared, weight: PlanedWeight, bias: Tensor | None, config: KernelConfig) -> Product:
    (tokens, inputs), (tiles, rows) = x.rows.shape, weight.words.shape[:2]
    tiles_per_split = triton.cdiv(tiles, config.splits)
    splits = triton.cdiv(tiles, tiles_per_split)
    parts = x.rows.new_empty(splits, tokens, rows, dtype=torch.float32)
    grid = (rows // config.block_n, splits, triton.cdiv(tokens, config.block_m))
    narrow_product[grid](
        x.rows, weight.words, weight.scale, _zero(weight), x.beside, parts,
        tokens, rows, inputs, tiles, tiles_per_split,
        **_constants(weight, x.rows.dtype), EVEN_K=_is_even(weight), BLOCK_N=config.block_n, BLOCK_M=config.block_m,
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return Product(parts, weight.shape[0], bias)


def _wide(x: Tensor, weight: PlanedWeight, bias: Tensor | None, config: KernelConfig) -> Tensor:
    (tokens, inputs), (tiles, rows) = x.shape, weight.words.shape[:2]
    y = x.new_empty(tokens, weight.shape[0])
    grid = (rows // config.block_n * triton.cdiv(tokens, config.block_m),)
    wide_product[grid](
        x, weight.words, weight.scale, _zero(weight), x if bias is None else bias, y,
        tokens, rows, inputs, weight.shape[0], tiles,
        **_constants(weight, x.dtype), HAS_BIAS=bias is not None, EVEN_K=_is_even(weight), BLOCK_N=config.block_n,
        BLOCK_M=config.block_m, GROUP_M=GROUP_M, STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return y


def _expanded(x: Tensor, weight: PlanedWeight, bias: Tensor | None, config: KernelConfig) -> Tensor:
    rows, inputs = weight.shape
    step = max(64, EXPANDED_ELEMENTS // inputs // 64 * 64)
    panel = x.new_empty(min(step, rows), inputs)
    y = x.new_empty(len(x), rows)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        dense = expand_rows(weight, first, panel[: stop - first])
        y[:, first:stop] = functional.linear(x, dense, None if bias is None else bias[first:stop])
    return y


def expand_rows(weight: PlanedWeight, first: int, out: Tensor) -> Tensor:
    """Fills `out [R, K]` with the dequantized rows from `first`, a multiple of 64, on."""
    expand[(len(weight.words), triton.cdiv(len(out), 64))](
        weight.words, weight.scale, _zero(weight), out, first, len(out), weight.words.shape[1], weight.shape[1],
        **_constants(weight, out.dtype), BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return out


def _zero(weight: PlanedWeight) -> Tensor:
    return weight.words if weight.zero is None else weight.zero  # an unused argument must still be a pointer


def _is_even(weight: PlanedWeight) -> bool:
    return weight.shape[1] % tile_inputs(weight.bits) == 0


def _constants(weight: PlanedWeight, dtype: torch.dtype) -> dict[str, Any]:
    is_bfloat16 = dtype == torch.bfloat16
    return {
        "BITS": weight.bits,
        "GROUP_SIZE": weight.group_size,
        "UNIT": weight.unit,
        "MIDPOINT": weight.midpoint,
        "HAS_ZERO": weight.zero is not None,
        "BFLOAT16": is_bfloat16,
        "PTX": unpack_instructions(weight.bits, is_bfloat16),
        "INTERPRETED": triton.knobs.runtime.interpret,
    }

"""Grids and arguments of the products with 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from compress.checkpoint.fp8 import Fp8Weight
from runtime.kernels.base import Target
from runtime.kernels.gpu.fp8 import narrow_fp8_product, wide_fp8_product
from runtime.kernels.gpu.launch import GROUP_M
from runtime.kernels.gpu.launch_bytes import BLOCK_N, MAX_BLOCK_K, MAX_NARROW_TOKENS, byte_tile, split_inputs
from runtime.kernels.gpu.launch_rows import finish, prepared
from runtime.kernels.handover import FLOATS, InputForm, Prepared, Product, finished

WIDE_TILE = {"BLOCK_N": 128, "BLOCK_M": 128, "BLOCK_K": MAX_BLOCK_K, "GROUP_M": GROUP_M, "STAGES": 3, "num_warps": 8}
"""How the product of many tokens is compiled."""


@dataclass(frozen=True, slots=True)
class PlacedFp8:
    """A weight `[N, K]` of 8-bit floats on its GPU.

    Attributes:
        codes: bytes of e4m3, uint8 `[N, K]`.
        scale: `[N]`.
        rounds_inputs: whether it is multiplied by 8-bit activations.
        native: whether the GPU multiplies 8-bit floats itself.
        num_processors: of the GPU.
        dtype: of activations, bfloat16 or float16.
    """

    codes: Tensor
    scale: Tensor
    rounds_inputs: bool
    native: bool
    num_processors: int
    dtype: torch.dtype

    @property
    def form(self) -> InputForm:
        return InputForm(FLOATS) if self.rounds_inputs else InputForm()

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def place_fp8(weight: Fp8Weight, target: Target, native: bool, num_processors: int) -> PlacedFp8:
    """A weight on the target's GPU, its codes as they are stored; `native` and `num_processors` are of that GPU."""
    codes, scale = weight.codes.view(torch.uint8).to(target.device), weight.scale[:, 0].contiguous().to(target.device)
    return PlacedFp8(codes, scale, bool(weight.scheme.activation_bits), native, num_processors, target.dtype)


def multiply_fp8(x: Tensor, weight: PlacedFp8, bias: Tensor | None) -> Tensor:
    """`x [M, K] -> x W^T + bias [M, N]` with float32 sums; each token is rounded to 8-bit floats first where the weight
    says so."""
    return finish(fp8_parts(prepared(x, weight.form), weight, bias), weight.dtype)


def fp8_parts(x: Prepared, weight: PlacedFp8, bias: Tensor | None) -> Product:
    """The product of an input in the weight's form: of 8-bit floats where there are many tokens and the GPU multiplies
    such, else of the same numbers in 16 bits."""
    if len(x.rows) > MAX_NARROW_TOKENS and weight.native and x.beside is not None:
        return finished(_wide(x.rows, x.beside, weight, bias))
    (tokens, inputs), rows = x.rows.shape, len(weight.codes)
    tile = byte_tile(tokens, 0)
    splits, blocks_per_split = split_inputs(rows, inputs, tokens, tile, weight.num_processors)
    parts = x.rows.new_empty(splits, tokens, rows, dtype=torch.float32)
    narrow_fp8_product[(triton.cdiv(rows, BLOCK_N), splits, triton.cdiv(tokens, tile["BLOCK_M"]))](
        x.rows, weight.codes, weight.scale, parts, tokens, inputs, rows, blocks_per_split,
        LEVELS=weight.rounds_inputs, **tile, NATIVE=weight.native, INTERPRETED=triton.knobs.runtime.interpret,
    )  # fmt: skip
    return Product(parts, rows, bias, None if x.beside is None else (x.beside, weight.scale))


def _wide(levels: Tensor, token_scale: Tensor, weight: PlacedFp8, bias: Tensor | None) -> Tensor:
    (tokens, inputs), rows = levels.shape, len(weight.codes)
    y = levels.new_empty(tokens, rows, dtype=weight.dtype)
    grid = (triton.cdiv(rows, WIDE_TILE["BLOCK_N"]) * triton.cdiv(tokens, WIDE_TILE["BLOCK_M"]),)
    wide_fp8_product[grid](
        levels, weight.codes, token_scale, weight.scale, y if bias is None else bias, y, tokens, inputs, rows,
        HAS_BIAS=bias is not None, **WIDE_TILE, INTERPRETED=triton.knobs.runtime.interpret,
    )  # fmt: skip
    return y

"""Products with weights of 8-bit floats (e4m3), with activations in 16 bits or rounded to such floats too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.checkpoint.scale_search import FP8
from runtime.backends.triton.fused_linear import Q8_FLOAT, ActivationLayout, PartialSums, QuantizedInput, finished
from runtime.backends.triton.kernels.common import (
    from_fp8,
    grouped_tile,
    load_tile,
    multiply,
    prefetch_rows,
    split_tile,
    store_sums,
    store_tile,
    wait_for_inputs,
)
from runtime.backends.triton.kernels.int8_gemm import (
    MAX_BLOCK_K,
    MAX_SKINNY_TOKENS,
    split_inputs,
    tile_tokens,
)
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.split_product import SplitProduct
from runtime.backends.triton.kernels.w4a16 import GROUP_M
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.panels import EXPANDED_ROWS, Expander, multiply_by_panels
from runtime.backends.triton.product_times import NEVER
from runtime.backends.triton.sizes import cdiv, next_power_of_2


@triton.jit
def widened(codes, like: tl.constexpr, MULTIPLIES_FP8: tl.constexpr, INTERPRETED: tl.constexpr):
    """Bytes of e4m3 as floats of type `like`, exactly (float32 in the interpreter). MULTIPLIES_FP8: by an
    instruction that GPUs without 8-bit floats lack."""
    if MULTIPLIES_FP8 and not INTERPRETED:
        # By way of float32: there is an instruction from float16 to bfloat16, but a slow one.
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(like)
    else:
        return from_fp8(codes, INTERPRETED, like)


@Launcher
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def fp8_skinny_gemm(
    x_ptr, codes_ptr, group_scale_ptr, row_scale_ptr, part_ptr, M, K, ROWS, blocks_per_split,
    GROUP: tl.constexpr, Q8_INPUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, MULTIPLIES_FP8: tl.constexpr, INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """Partial sums `part [splits, M, ROWS]` float32 of `x [M, K]` and e4m3 codes `[ROWS, K]`: 16-bit x by weights with
    their scale, or with Q8_INPUT e4m3 numbers by codes, both without scales. 8-bit floats are exact in 16 bits, so only
    sums are rounded. GROUP inputs of a row share a float32 scale `[ROWS, K / GROUP]` in addition to that of the row;
    0 for none. Scales of whole blocks multiply float32 sums; those of smaller groups multiply numbers in 16 bits:
    powers of two do so exactly."""
    n, split, m = split_tile(BLOCK_N, BLOCK_M)
    first = split * blocks_per_split
    if WAITS:
        prefetch_rows(codes_ptr, n, first * BLOCK_K, ROWS, K)
    wait_for_inputs(WAITS)
    like = tl.float16 if Q8_INPUT else x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        codes = load_tile(codes_ptr, n[:, None], k[None, :], ROWS, K)
        x = load_tile(x_ptr, m[None, :], k[:, None], M, K)
        if Q8_INPUT:
            x = widened(x, like, MULTIPLIES_FP8, INTERPRETED)
        numbers = widened(codes, like, MULTIPLIES_FP8, INTERPRETED)
        if GROUP == 0:
            total = multiply(numbers, x, total, INTERPRETED)
        elif GROUP >= BLOCK_K:
            place = tl.full((1, 1), block * BLOCK_K // GROUP, tl.int32)
            scales = load_tile(group_scale_ptr, n[:, None], place, ROWS, tl.cdiv(K, GROUP))
            total += multiply(numbers, x, tl.zeros((BLOCK_N, BLOCK_M), tl.float32), INTERPRETED) * scales
        else:
            group = block * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
            scales = load_tile(group_scale_ptr, n[:, None], group[None, :], ROWS, K // GROUP)
            scales = scales if INTERPRETED else scales.to(like)
            repeated = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_K // GROUP, GROUP)).reshape(BLOCK_N, BLOCK_K)
            total = multiply(numbers * repeated, x, total, INTERPRETED)
    if not Q8_INPUT:
        total *= tl.load(row_scale_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)[:, None]
    store_sums(part_ptr, total, split, m[None, :], n[:, None], M, ROWS)


@Launcher
@triton.jit(do_not_specialize=["M"])
def fp8_gemm(
    q8_ptr, codes_ptr, token_scale_ptr, row_scale_ptr, bias_ptr, y_ptr, M, K, ROWS,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """`y [M, ROWS]` in its own dtype: the product of e4m3 `q8 [M, K]` and e4m3 codes `[ROWS, K]` by a GPU's own
    8-bit products, times both scales, and the bias. Those products keep about 14 bits of a sum: after each BLOCK_K of
    inputs they are added up in float32."""
    n, m = grouped_tile(M, ROWS, BLOCK_N, BLOCK_M, GROUP_M)
    if WAITS:
        prefetch_rows(codes_ptr, n, 0, ROWS, K)
    wait_for_inputs(WAITS)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        q8 = load_tile(q8_ptr, m[:, None], k[None, :], M, K)
        codes = load_tile(codes_ptr, n[None, :], k[:, None], ROWS, K)
        if INTERPRETED:
            total = tl.dot(from_fp8(q8, True, tl.float32), from_fp8(codes, True, tl.float32), total)
        else:
            q8 = q8.to(tl.float8e4nv, bitcast=True)
            codes = codes.to(tl.float8e4nv, bitcast=True)
            total = tl.dot(q8, codes, total, max_num_imprecise_acc=BLOCK_K)
    token_scale = tl.load(token_scale_ptr + m, mask=m < M, other=0.0)
    row_scale = tl.load(row_scale_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)
    y = total * row_scale[None, :] * token_scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)[None, :]
    store_tile(y_ptr, y, m[:, None], n[None, :], M, ROWS)


@Launcher
@triton.jit
def expand_fp8(
    codes_ptr, group_scale_ptr, row_scale_ptr, weight_ptr, first_row, ROWS, K,
    GROUP: tl.constexpr, MULTIPLIES_FP8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantizes rows from `first_row` on into `weight [ROWS, K]`, of codes and scales as `fp8_skinny_gemm` has them.
    Programs (block of inputs, rows)."""
    row, block = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0)
    n, stop, k = first_row + row, first_row + ROWS, block * BLOCK_K + tl.arange(0, BLOCK_K)
    scale = tl.load(row_scale_ptr + n, mask=row < ROWS, other=0.0).to(tl.float32)[:, None]
    if GROUP > 0:
        SIZE: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
        group = (block * BLOCK_K + tl.arange(0, BLOCK_K // SIZE) * SIZE) // GROUP
        scales = load_tile(group_scale_ptr, n[:, None], group[None, :], stop, tl.cdiv(K, GROUP)) * scale
        scale = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_K // SIZE, SIZE)).reshape(BLOCK_N, BLOCK_K)
    codes = load_tile(codes_ptr, n[:, None], k[None, :], stop, K)
    weight = widened(codes, tl.float32, MULTIPLIES_FP8, INTERPRETED) * scale
    store_tile(weight_ptr, weight, row[:, None], k[None, :], ROWS, K)


def skinny_tile(tokens: int) -> dict[str, Any]:
    """Tile of a product in 16 bits for a number of tokens."""
    block_m = min(MAX_SKINNY_TOKENS, max(8, next_power_of_2(tokens)))
    warps = 2 if block_m <= 32 else 4  # as those of packed codes
    return {"BLOCK_N": 64, "BLOCK_M": block_m, "BLOCK_K": MAX_BLOCK_K, "STAGES": 4, "num_warps": warps}


WIDE_TILE = {"BLOCK_N": 128, "BLOCK_M": 128, "BLOCK_K": MAX_BLOCK_K, "GROUP_M": GROUP_M, "STAGES": 3, "num_warps": 8}
"""Tile of the GEMM of many tokens."""


@dataclass(frozen=True, slots=True)
class Fp8Linear(PackedLinear):
    """A weight `[N, K]` of 8-bit floats, its codes as they are stored.

    Attributes:
        qweight: bytes of e4m3, uint8 `[at least N, K]`.
        scales: `[N]`.
        group_scales: float32 `[N, K / group]`, also of powers of two: GPUs copy no less than 4 bytes asynchronously;
            None for none.
        bias: `[N]`, or None.
        rounds_inputs: whether it is multiplied by 8-bit activations.
        native: whether the GPU multiplies 8-bit floats itself.
        num_processors: of the GPU.
        dtype: of activations, bfloat16 or float16.
        group: inputs that share a scale of `group_scales`; 0 for none.
        panel_from: tokens from which dense panels are multiplied; never where inputs are rounded.
        scaled_from: tokens from which torch multiplies 8-bit floats; rows and inputs are then multiples of 16.
    """

    qweight: Tensor
    scales: Tensor
    group_scales: Tensor | None
    bias: Tensor | None
    rounds_inputs: bool
    native: bool
    num_processors: int
    dtype: torch.dtype
    group: int = 0
    panel_from: int = NEVER
    scaled_from: int = NEVER

    @property
    def nbytes(self) -> int:
        of_groups = 0 if self.group_scales is None else self.group_scales.nbytes
        return self.qweight.nbytes + self.scales.nbytes + of_groups

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout(Q8_FLOAT) if self.rounds_inputs else ActivationLayout()

    def product(self, x: QuantizedInput) -> PartialSums:
        """Multiplies 8-bit floats where inputs are rounded, there are many tokens and the GPU can; else the same
        numbers in 16 bits."""
        tokens, rows = x.rows.shape[0], len(self.scales)
        if tokens >= self.panel_from:
            return finished(multiply_by_panels(x.rows, rows, self.bias, self.expand_rows))
        if x.beside is not None and tokens >= self.scaled_from:
            return PartialSums(self._scaled(x.rows), rows, self.bias, (x.beside, self.scales))
        is_wide = tokens > MAX_SKINNY_TOKENS and self.native and x.beside is not None
        size = tile_tokens(tokens)
        if size not in self._products:
            self._products[size] = self._wide() if is_wide else self._skinny(size)
        if x.beside is not None and is_wide:
            return finished(self._products[size](x.rows, x.beside)[0])
        sums = self._products[size](x.rows)
        return PartialSums(sums, rows, self.bias, None if x.beside is None else (x.beside, self.scales))

    @cached_property
    def expand_rows(self) -> Expander:
        """Prepared launches that dequantize rows."""
        inputs = self.qweight.shape[1]
        kernel = expand_fp8.bind(
            codes_ptr=self.qweight, group_scale_ptr=self.group_scales, row_scale_ptr=self.scales, K=inputs,
            GROUP=self.group, MULTIPLIES_FP8=self.native, BLOCK_N=EXPANDED_ROWS, BLOCK_K=MAX_BLOCK_K, num_warps=4,
            INTERPRETED=triton.knobs.runtime.interpret,
        )  # fmt: skip
        return Expander(kernel, cdiv(inputs, MAX_BLOCK_K))

    def _scaled(self, codes: Tensor) -> Tensor:
        """Products of numbers without scales `[1, M, N]`, whose sums are kept in float32."""
        numbers, weight, one = codes.view(FP8), self.qweight.view(FP8).T, self._one
        return torch._scaled_mm(numbers, weight, one, one, out_dtype=torch.float32).unsqueeze(0)

    @cached_property
    def _one(self) -> Tensor:
        return torch.ones((), device=self.qweight.device)

    def _skinny(self, tokens: int) -> SplitProduct:
        rows, inputs, tile = len(self.scales), self.qweight.shape[1], skinny_tile(tokens)
        splits, blocks_per_split = split_inputs(rows, inputs, tokens, tile, self.num_processors)
        kernel = fp8_skinny_gemm.bind(
            codes_ptr=self.qweight, group_scale_ptr=self.group_scales, row_scale_ptr=self.scales, K=inputs, ROWS=rows,
            blocks_per_split=blocks_per_split, GROUP=self.group, Q8_INPUT=self.rounds_inputs, **tile,
            MULTIPLIES_FP8=self.native, INTERPRETED=triton.knobs.runtime.interpret,
        )  # fmt: skip
        return SplitProduct(kernel, rows, cdiv(rows, tile["BLOCK_N"]), splits, tile["BLOCK_M"])

    def _wide(self) -> SplitProduct:
        rows, inputs = len(self.scales), self.qweight.shape[1]
        kernel = fp8_gemm.bind(
            codes_ptr=self.qweight, row_scale_ptr=self.scales, bias_ptr=self.bias, K=inputs, ROWS=rows,
            HAS_BIAS=self.bias is not None, **WIDE_TILE, INTERPRETED=triton.knobs.runtime.interpret,
        )  # fmt: skip
        blocks_n = cdiv(rows, WIDE_TILE["BLOCK_N"])
        return SplitProduct(kernel, rows, blocks_n, 1, WIDE_TILE["BLOCK_M"], self.dtype, is_grouped=True)

"""Weight-only GEMM and skinny GEMM of 2- to 8-bit codes: kernels and launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.prepared_weight import PreparedWeight
from runtime.backends.triton.fused_linear import SUMS, ActivationLayout, PartialSums, QuantizedInput, finished
from runtime.backends.triton.kernels.common import (
    PREFETCHED,
    code_offset,
    grouped_tile,
    multiply,
    prefetch,
    split_tile,
    store_sums,
    store_tile,
    unpack,
    unpack_instructions,
    wait_for_inputs,
)
from runtime.backends.triton.kernels.configs import EXPAND, SKINNY, KernelConfig, Plan, bucket_of
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.split_product import SplitProduct
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, prepared, tile_inputs
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.panels import EXPANDED_ROWS, Expander, multiply_by_panels
from runtime.backends.triton.sizes import cdiv


@triton.jit
def zero_and_scale(words, like: tl.constexpr):
    """Zero points and scales as float32, of words that hold both as type `like`."""
    if like == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    elif like == tl.float16:
        zero, scale = words.to(tl.int16), (words >> 16).to(tl.int16)
        return zero.to(tl.float16, bitcast=True).to(tl.float32), scale.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        zero, scale = words.to(tl.int32), (words >> 32).to(tl.int32)
        return zero.to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True)


@triton.jit
def prefetch_tiles(words_ptr, n, first, N, num_tiles):
    """Prefetches rows n of tiles of words `[num_tiles, N, 32]` from a first one on."""
    tile = tl.minimum(first + tl.arange(0, PREFETCHED), num_tiles - 1)
    prefetch(words_ptr + (tile.to(tl.int64)[:, None] * N + n[None, :]) * 32)


@Launcher
@triton.jit(do_not_specialize=["M", "num_tiles", "tiles_per_split"])
def w4a16_skinny_gemm(
    x_ptr, words_ptr, scale_ptr, sums_ptr, part_ptr, M, N, K, num_tiles, tiles_per_split,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, SCALE_TYPE: tl.constexpr, EVEN_K: tl.constexpr,
    BFLOAT16: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """Partial sums `part [splits, M, N]` float32 of `x [M, K]` and packed weights with N rows, a multiple of BLOCK_N.

    `sums [K / unit, M]` are those of `x` over the unit that shares a scale inside a tile. They are taken off tile by
    tile, as the offset of small codes would drown sums of a long row.
    """
    TILE: tl.constexpr = 512 // BITS
    WHOLE_ROW: tl.constexpr = BITS == 8 and GROUP_SIZE == 0
    n, split, m = split_tile(BLOCK_N, BLOCK_M)
    first = split * tiles_per_split
    if WAITS:
        prefetch_tiles(words_ptr, n, first, N, num_tiles)
    wait_for_inputs(WAITS)
    lane = tl.arange(0, 32)
    has_token = m < M
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    words_ptrs = words_ptr + (first.to(tl.int64) * N + n)[:, None] * 32 + lane[None, :]
    all_x = tl.zeros((BLOCK_M,), tl.float32)
    if GROUP_SIZE == 0:
        zero, scale = zero_and_scale(tl.load(scale_ptr + n), SCALE_TYPE)
    for tile in tl.range(first, tl.minimum(first + tiles_per_split, num_tiles), num_stages=STAGES):
        words = tl.load(words_ptrs, eviction_policy="evict_first")
        for unit in tl.static_range(TILE // UNIT):
            raw = total if WHOLE_ROW else tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
                k = tile * TILE + plane * 32 + lane
                inside = has_token[None, :] if EVEN_K else has_token[None, :] & (k < K)[:, None]
                x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=inside, other=0.0)
                raw = multiply(unpack(words, plane, BITS, BFLOAT16, PTX, INTERPRETED), x, raw, INTERPRETED)
            if GROUP_SIZE > 0:
                group = (tile * TILE + unit * UNIT) // GROUP_SIZE
                zero, scale = zero_and_scale(tl.load(scale_ptr + group * N + n), SCALE_TYPE)
            x_sum = tl.load(sums_ptr + (tile * (TILE // UNIT) + unit) * M + m, mask=has_token, other=0.0)
            if WHOLE_ROW:
                total = raw
                all_x += x_sum
            else:
                total += scale[:, None] * (raw - (code_offset(BITS, BFLOAT16) + zero)[:, None] * x_sum[None, :])
        words_ptrs += N * 32
    if WHOLE_ROW:
        total = scale[:, None] * (total - (code_offset(BITS, BFLOAT16) + zero)[:, None] * all_x[None, :])
    store_sums(part_ptr, total, split, m[None, :], n[:, None], M, N)


@triton.jit
def centred_plane(
    words, zero, plane: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`code - zero` of a plane `[n, 32]`, for zero `[n]`: exact in 16 bits."""
    codes = unpack(words, plane, BITS, BFLOAT16, PTX, INTERPRETED)
    return codes - (zero + code_offset(BITS, BFLOAT16)).to(codes.dtype)[:, None]


@triton.jit
def dequantized_plane(
    words, zero, scale, plane: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`(code - zero) * scale` of a plane `[n, 32]`, for zero and scale `[n]` in the dtype of the activations: rounded
    once."""
    centred = centred_plane(words, zero, plane, BITS, BFLOAT16, PTX, INTERPRETED)
    return (centred * scale.to(centred.dtype)[:, None]).to(scale.dtype)


@triton.jit
def dequantized_product(
    x_ptr, words_ptr, scale_ptr, x_row, has_row, n, STRIDE, K, first, stop,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, SCALE_TYPE: tl.constexpr, EVEN_K: tl.constexpr,
    BFLOAT16: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Float32 products `[BLOCK_N, BLOCK_M]` of rows `n` of packed weights, STRIDE in all, and rows `x_row` (int64) of
    `x [., K]`, which count as zeros where `has_row` is false, over tiles of inputs from `first` to `stop`. Weights are
    rounded to 16 bits if they have groups; else their sums are scaled."""
    TILE: tl.constexpr = 512 // BITS
    lane = tl.arange(0, 32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    words_ptrs = words_ptr + (tl.cast(first, tl.int64) * STRIDE + n)[:, None] * 32 + lane[None, :]
    if GROUP_SIZE == 0:
        zero, scale = zero_and_scale(tl.load(scale_ptr + n), SCALE_TYPE)
    for tile in tl.range(first, stop, num_stages=STAGES):
        words = tl.load(words_ptrs)
        for unit in tl.static_range(TILE // UNIT):
            if GROUP_SIZE > 0:
                group = (tile * TILE + unit * UNIT) // GROUP_SIZE
                zero, scale = zero_and_scale(tl.load(scale_ptr + group * STRIDE + n), SCALE_TYPE)
            for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
                k = tile * TILE + plane * 32 + lane
                inside = has_row[None, :] if EVEN_K else has_row[None, :] & (k < K)[:, None]
                x = tl.load(x_ptr + x_row[None, :] * K + k[:, None], mask=inside, other=0.0)
                if GROUP_SIZE > 0:
                    like = x_ptr.dtype.element_ty
                    weight = dequantized_plane(words, zero, scale.to(like), plane, BITS, BFLOAT16, PTX, INTERPRETED)
                else:
                    weight = centred_plane(words, zero, plane, BITS, BFLOAT16, PTX, INTERPRETED)
                total = multiply(weight, x, total, INTERPRETED)
        words_ptrs += STRIDE * 32
    return total if GROUP_SIZE > 0 else total * scale[:, None]


@Launcher
@triton.jit(do_not_specialize=["M", "num_tiles", "tiles_per_split"])
def w4a16_gemm(
    x_ptr, words_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, ROWS, num_tiles, tiles_per_split,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, SCALE_TYPE: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """`y [splits, M, ROWS]` in its own dtype, for each split of K, of `x [M, K]` and packed weights with N rows, a
    multiple of BLOCK_N."""
    n, m = grouped_tile(M, N, BLOCK_N, BLOCK_M, GROUP_M)
    split = tl.program_id(1)
    first = split * tiles_per_split
    if WAITS:
        prefetch_tiles(words_ptr, n, first, N, num_tiles)
    wait_for_inputs(WAITS)
    total = dequantized_product(
        x_ptr, words_ptr, scale_ptr, m.to(tl.int64), m < M, n, N, K, first,
        tl.minimum(first + tiles_per_split, num_tiles), BITS, GROUP_SIZE, UNIT, SCALE_TYPE, EVEN_K, BFLOAT16, PTX,
        BLOCK_N, BLOCK_M, STAGES, INTERPRETED,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)[:, None]
    store_sums(y_ptr, total, split, m[None, :], n[:, None], M, ROWS)


@Launcher
@triton.jit
def expand(
    words_ptr, scale_ptr, weight_ptr, first_row, ROWS, N, K,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, SCALE_TYPE: tl.constexpr,
    BFLOAT16: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantizes rows from `first_row` on into `weight [ROWS, K]`, for a dense product of many tokens."""
    TILE: tl.constexpr = 512 // BITS
    tile, row = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n, lane = first_row + row, tl.arange(0, 32)
    words = tl.load(words_ptr + (tile.to(tl.int64) * N + n)[:, None] * 32 + lane[None, :])
    for unit in tl.static_range(TILE // UNIT):
        group = (tile * TILE + unit * UNIT) // GROUP_SIZE if GROUP_SIZE > 0 else 0
        zero, scale = zero_and_scale(tl.load(scale_ptr + group * N + n), SCALE_TYPE)
        for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
            k = tile * TILE + plane * 32 + lane
            if tl.float32 == SCALE_TYPE:  # zero points may be fractions
                codes = unpack(words, plane, BITS, BFLOAT16, PTX, INTERPRETED).to(tl.float32)
                weight = (codes - code_offset(BITS, BFLOAT16) - zero[:, None]) * scale[:, None]
            else:
                like = weight_ptr.dtype.element_ty
                weight = dequantized_plane(words, zero, scale.to(like), plane, BITS, BFLOAT16, PTX, INTERPRETED)
            store_tile(weight_ptr, weight, row[:, None], k[None, :], ROWS, K)


GROUP_M = 8


@dataclass(frozen=True, slots=True)
class W4A16Linear(PackedLinear):
    """A weight of 2- to 8-bit codes in planes; the plan says which kernel multiplies by it for how many tokens."""

    weight: InterleavedWeight
    bias: Tensor | None
    plan: Plan

    @cached_property
    def _expanders(self) -> dict[torch.dtype, Expander]:
        return {}

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def prepared(self) -> PreparedWeight:
        """Returns its tensors, which are not copied."""
        return prepared(self.weight)

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        """Rows, with their sums where the skinny GEMM reads those."""
        return self._sums if self.plan[bucket_of(num_tokens)].kernel == SKINNY else ActivationLayout()

    @cached_property
    def _sums(self) -> ActivationLayout:
        unit = self.weight.unit
        return ActivationLayout(SUMS, unit, len(self.weight.words) * tile_inputs(self.weight.bits) // unit)

    def product(self, x: QuantizedInput) -> PartialSums:
        """Finished rows; sums without the bias by the skinny GEMM and where there are several splits."""
        bucket, dtype = bucket_of(x.rows.shape[0]), x.rows.dtype
        product = self._products.get((bucket, dtype))
        if product is None:
            if self.plan[bucket].kernel == EXPAND:
                expand_rows = self._expanders.get(dtype)
                if expand_rows is None:
                    expand_rows = self._expanders[dtype] = expander_of(self.weight, dtype)
                return finished(multiply_by_panels(x.rows, self.weight.shape[0], self.bias, expand_rows))
            product = self._products[bucket, dtype] = self._prepare(self.plan[bucket], dtype)
        sums = product(x.rows) if x.beside is None else product(x.rows, x.beside)
        return PartialSums(sums, self.weight.shape[0], self.bias if sums.dtype == torch.float32 else None)

    def _prepare(self, config: KernelConfig, dtype: torch.dtype) -> SplitProduct:
        (tiles, stride, _), (rows, inputs) = self.weight.words.shape, self.weight.shape
        tiles_per_split = cdiv(tiles, config.splits)
        splits, blocks_n = cdiv(tiles, tiles_per_split), stride // config.block_n
        given = {
            "words_ptr": self.weight.words,
            "scale_ptr": self.weight.scales,
            "N": stride,
            "K": inputs,
            "num_tiles": tiles,
            "tiles_per_split": tiles_per_split,
            **layout_constants(self.weight, dtype),
            **_tile(self.weight, config),
        }
        if config.kernel == SKINNY:
            return SplitProduct(w4a16_skinny_gemm.bind(**given), stride, blocks_n, splits, config.block_m)
        bias, out = (self.bias, dtype) if splits == 1 else (None, torch.float32)
        kernel = w4a16_gemm.bind(**given, bias_ptr=bias, ROWS=rows, HAS_BIAS=bias is not None, GROUP_M=GROUP_M)
        return SplitProduct(kernel, rows, blocks_n, splits, config.block_m, out, is_grouped=True)


def expander_of(weight: InterleavedWeight, dtype: torch.dtype) -> Expander:
    """Prepares launches that dequantize rows to a dtype."""
    kernel = expand.bind(
        words_ptr=weight.words, scale_ptr=weight.scales, N=weight.words.shape[1], K=weight.shape[1],
        **layout_constants(weight, dtype), BLOCK_N=EXPANDED_ROWS, num_warps=4,
    )  # fmt: skip
    return Expander(kernel, len(weight.words))


def _tile(weight: InterleavedWeight, config: KernelConfig) -> dict[str, Any]:
    return {
        "EVEN_K": weight.shape[1] % tile_inputs(weight.bits) == 0,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


SCALE_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def layout_constants(weight: InterleavedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time constants of kernels that read the layout."""
    is_bfloat16 = dtype == torch.bfloat16
    return {
        "BITS": weight.bits,
        "GROUP_SIZE": weight.group_size,
        "UNIT": weight.unit,
        "SCALE_TYPE": SCALE_TYPES[weight.scale_dtype],
        "BFLOAT16": is_bfloat16,
        "PTX": unpack_instructions(weight.bits, is_bfloat16),
        "INTERPRETED": triton.knobs.runtime.interpret,
    }

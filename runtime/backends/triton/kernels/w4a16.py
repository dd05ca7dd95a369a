"""Weight-only GEMM and skinny GEMM of 2- to 4-bit codes: kernels and launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from runtime.backends.triton.fused_linear import SUMS, ActivationLayout, PartialSums, QuantizedInput, finished
from runtime.backends.triton.kernels.common import grouped_tile, multiply, store_tile, unpack, unpack_instructions
from runtime.backends.triton.kernels.configs import EXPAND, SKINNY, KernelConfig, Plan, config_for
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, tile_inputs


@triton.jit(do_not_specialize=["M"])
def w4a16_skinny_gemm(
    x_ptr, words_ptr, scale_ptr, zero_ptr, sums_ptr, part_ptr,
    M, N, K, num_tiles, tiles_per_split,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Partial sums `part [splits, M, N]` float32 of `x [M, K]` and packed weights with N rows, a multiple of BLOCK_N.

    `sums [K / unit, M]` are those of `x` over the unit that shares a scale inside a tile.
    """
    TILE: tl.constexpr = 512 // BITS
    OFFSET: tl.constexpr = 128.0 if BFLOAT16 else 1024.0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, 32)
    has_token = m < M
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * tiles_per_split
    words_ptrs = words_ptr + (first.to(tl.int64) * N + n)[:, None] * 32 + lane[None, :]
    for tile in tl.range(first, tl.minimum(first + tiles_per_split, num_tiles), num_stages=STAGES):
        words = tl.load(words_ptrs, eviction_policy="evict_first")
        for unit in tl.static_range(TILE // UNIT):
            raw = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
                k = tile * TILE + plane * 32 + lane
                inside = has_token[None, :] if EVEN_K else has_token[None, :] & (k < K)[:, None]
                x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=inside, other=0.0)
                raw = multiply(unpack(words, plane, BITS, BFLOAT16, PTX, INTERPRETED), x, raw, INTERPRETED)
            group = (tile * TILE + unit * UNIT) // GROUP_SIZE if GROUP_SIZE > 0 else 0
            scale = tl.load(scale_ptr + group * N + n).to(tl.float32)
            x_sum = tl.load(sums_ptr + (tile * (TILE // UNIT) + unit) * M + m, mask=has_token, other=0.0)
            if HAS_ZERO:
                zero = tl.load(zero_ptr + group * N + n).to(tl.float32)
                total += scale[:, None] * (raw - (OFFSET + zero)[:, None] * x_sum[None, :])
            else:
                total += scale[:, None] * (raw - (OFFSET + MIDPOINT) * x_sum[None, :])
        words_ptrs += N * 32
    tl.store(part_ptr + (split * M + m[None, :]) * N + n[:, None], total, mask=has_token[None, :])


@triton.jit
def dequantized_plane(
    words, zero, scale, plane: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`(code - zero) * scale` of a plane `[n, 32]`, for zero and scale `[n]` in the dtype of the activations.

    The difference is exact; the product is rounded once.
    """
    OFFSET: tl.constexpr = 128.0 if BFLOAT16 else 1024.0
    codes = unpack(words, plane, BITS, BFLOAT16, PTX, INTERPRETED)
    centred = codes - (zero + OFFSET).to(codes.dtype)[:, None]
    product = centred * scale.to(codes.dtype)[:, None]
    return product.to(scale.dtype)


@triton.jit
def zero_and_scale(zero_ptr, scale_ptr, place, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Zero point as float32 and scale as stored, of rows `place [n]` in their arrays."""
    scale = tl.load(scale_ptr + place)
    if HAS_ZERO:
        zero = tl.load(zero_ptr + place).to(tl.float32)
    else:
        zero = tl.full(place.shape, MIDPOINT, tl.float32)
    return zero, scale


@triton.jit
def dequantized_product(
    x_ptr, words_ptr, scale_ptr, zero_ptr, x_row, has_row, n, STRIDE, K, num_tiles,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Float32 products `[BLOCK_N, BLOCK_M]` of rows `n` of packed weights, STRIDE in all, and rows `x_row` (int64) of
    `x [., K]`, which count as zeros where `has_row` is false."""
    TILE: tl.constexpr = 512 // BITS
    lane = tl.arange(0, 32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    words_ptrs = words_ptr + n.to(tl.int64)[:, None] * 32 + lane[None, :]
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        words = tl.load(words_ptrs)
        for unit in tl.static_range(TILE // UNIT):
            group = (tile * TILE + unit * UNIT) // GROUP_SIZE if GROUP_SIZE > 0 else 0
            zero, scale = zero_and_scale(zero_ptr, scale_ptr, group * STRIDE + n, MIDPOINT, HAS_ZERO)
            for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
                k = tile * TILE + plane * 32 + lane
                inside = has_row[None, :] if EVEN_K else has_row[None, :] & (k < K)[:, None]
                x = tl.load(x_ptr + x_row[None, :] * K + k[:, None], mask=inside, other=0.0)
                weight = dequantized_plane(
                    words, zero, scale.to(x_ptr.dtype.element_ty), plane, BITS, BFLOAT16, PTX, INTERPRETED
                )
                total = multiply(weight, x, total, INTERPRETED)
        words_ptrs += STRIDE * 32
    return total


@triton.jit(do_not_specialize=["M"])
def w4a16_gemm(
    x_ptr, words_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K, ROWS, num_tiles,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`y [M, ROWS]` of `x [M, K]` and packed weights with N rows, a multiple of BLOCK_N."""
    n, m = grouped_tile(M, N, BLOCK_N, BLOCK_M, GROUP_M)
    total = dequantized_product(
        x_ptr, words_ptr, scale_ptr, zero_ptr, m.to(tl.int64), m < M, n, N, K, num_tiles, BITS, GROUP_SIZE, UNIT,
        MIDPOINT, HAS_ZERO, EVEN_K, BFLOAT16, PTX, BLOCK_N, BLOCK_M, STAGES, INTERPRETED,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)[:, None]
    store_tile(y_ptr, total, m[None, :], n[:, None], M, ROWS)


@triton.jit
def expand(
    words_ptr, scale_ptr, zero_ptr, weight_ptr, first_row, ROWS, N, K,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, MIDPOINT: tl.constexpr, HAS_ZERO: tl.constexpr,
    BFLOAT16: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantizes rows from `first_row` on into `weight [ROWS, K]`, for a dense product over very many tokens."""
    TILE: tl.constexpr = 512 // BITS
    tile, row = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n, lane = first_row + row, tl.arange(0, 32)
    words = tl.load(words_ptr + (tile.to(tl.int64) * N + n)[:, None] * 32 + lane[None, :])
    for unit in tl.static_range(TILE // UNIT):
        group = (tile * TILE + unit * UNIT) // GROUP_SIZE if GROUP_SIZE > 0 else 0
        zero, scale = zero_and_scale(zero_ptr, scale_ptr, group * N + n, MIDPOINT, HAS_ZERO)
        for plane in tl.static_range(unit * (UNIT // 32), (unit + 1) * (UNIT // 32)):
            k = tile * TILE + plane * 32 + lane
            weight = dequantized_plane(
                words, zero, scale.to(weight_ptr.dtype.element_ty), plane, BITS, BFLOAT16, PTX, INTERPRETED
            )
            store_tile(weight_ptr, weight, row[:, None], k[None, :], ROWS, K)


EXPANDED_ELEMENTS = 12 * 2**20
"""Weights that are dense at one time: 24 MB stay in the second-level cache of a large GPU."""
GROUP_M = 8


@dataclass(frozen=True, slots=True)
class W4A16Linear(PackedLinear):
    """A weight of 2- to 4-bit codes in planes; the plan says which kernel multiplies by it for how many tokens."""

    weight: InterleavedWeight
    bias: Tensor | None
    plan: Plan

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        """Rows, with their sums beside them where the skinny GEMM reads those."""
        if config_for(self.plan, num_tokens).kernel != SKINNY:
            return ActivationLayout()
        unit = self.weight.unit
        return ActivationLayout(SUMS, unit, len(self.weight.words) * tile_inputs(self.weight.bits) // unit)

    def product(self, x: QuantizedInput) -> PartialSums:
        config = config_for(self.plan, len(x.rows))
        if config.kernel == SKINNY:
            return self._skinny(x, config)
        return finished(self._expanded(x.rows) if config.kernel == EXPAND else self._gemm(x.rows, config))

    def _skinny(self, x: QuantizedInput, config: KernelConfig) -> PartialSums:
        (tokens, inputs), (tiles, rows) = x.rows.shape, self.weight.words.shape[:2]
        tiles_per_split = triton.cdiv(tiles, config.splits)
        splits = triton.cdiv(tiles, tiles_per_split)
        parts = x.rows.new_empty(splits, tokens, rows, dtype=torch.float32)
        w4a16_skinny_gemm[rows // config.block_n, splits, triton.cdiv(tokens, config.block_m)](
            x.rows, *_pointers(self.weight), x.beside, parts, tokens, rows, inputs, tiles, tiles_per_split,
            **layout_constants(self.weight, x.rows.dtype), **_tile(self.weight, config),
        )  # fmt: skip
        return PartialSums(parts, self.weight.shape[0], self.bias)

    def _gemm(self, x: Tensor, config: KernelConfig) -> Tensor:
        (tokens, inputs), (tiles, rows) = x.shape, self.weight.words.shape[:2]
        y = x.new_empty(tokens, self.weight.shape[0])
        w4a16_gemm[(rows // config.block_n * triton.cdiv(tokens, config.block_m),)](
            x, *_pointers(self.weight), x if self.bias is None else self.bias, y,
            tokens, rows, inputs, y.shape[1], tiles, **layout_constants(self.weight, x.dtype),
            HAS_BIAS=self.bias is not None, GROUP_M=GROUP_M, **_tile(self.weight, config),
        )  # fmt: skip
        return y

    def _expanded(self, x: Tensor) -> Tensor:
        rows, inputs = self.weight.shape
        step = max(64, EXPANDED_ELEMENTS // inputs // 64 * 64)
        panel = x.new_empty(min(step, rows), inputs)
        y = x.new_empty(len(x), rows)
        for first in range(0, rows, step):
            stop = min(first + step, rows)
            dense = expand_rows(self.weight, first, panel[: stop - first])
            y[:, first:stop] = functional.linear(x, dense, None if self.bias is None else self.bias[first:stop])
        return y


def expand_rows(weight: InterleavedWeight, first: int, out: Tensor) -> Tensor:
    """Fills `out [R, K]` with the dequantized rows from `first`, a multiple of 64, on."""
    expand[len(weight.words), triton.cdiv(len(out), 64)](
        *_pointers(weight), out, first, len(out), weight.words.shape[1], weight.shape[1],
        **layout_constants(weight, out.dtype), BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return out


def _pointers(weight: InterleavedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Words, scales and zero points; an unused argument must still be a pointer."""
    return weight.words, weight.scales, weight.words if weight.zero_points is None else weight.zero_points


def _tile(weight: InterleavedWeight, config: KernelConfig) -> dict[str, Any]:
    return {
        "EVEN_K": weight.shape[1] % tile_inputs(weight.bits) == 0,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def layout_constants(weight: InterleavedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time constants of kernels that read the layout."""
    is_bfloat16 = dtype == torch.bfloat16
    return {
        "BITS": weight.bits,
        "GROUP_SIZE": weight.group_size,
        "UNIT": weight.unit,
        "MIDPOINT": weight.midpoint,
        "HAS_ZERO": weight.zero_points is not None,
        "BFLOAT16": is_bfloat16,
        "PTX": unpack_instructions(weight.bits, is_bfloat16),
        "INTERPRETED": triton.knobs.runtime.interpret,
    }

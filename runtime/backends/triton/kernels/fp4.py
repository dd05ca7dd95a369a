"""Products with weights of 4-bit floats (e2m1) in groups that share a scale, with activations in 16 bits.

Weight-only on every GPU: also on those that multiply 4-bit floats themselves, which would have to round activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.fused_linear import ActivationLayout, PartialSums, QuantizedInput
from runtime.backends.triton.kernels.common import load_tile, multiply, split_tile, store_sums
from runtime.backends.triton.kernels.fp8 import skinny_tile
from runtime.backends.triton.kernels.int8_gemm import split_inputs, tile_tokens
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.split_product import SplitProduct
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.sizes import cdiv

HALF = 64
"""Inputs of a block whose codes are in the low halves of bytes; as many follow in the high halves."""
BLOCK = 2 * HALF


@triton.jit
def numbers_of(codes, like: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes of e2m1 (int32, below 16) as floats of type `like` (float32 in the interpreter), exactly: their bits moved
    into a float16, whose exponent is then put right."""
    bits = (codes & 8) << 12 | (codes & 7) << 9
    numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return numbers if INTERPRETED else numbers.to(like)


@triton.jit
def scaled_numbers(
    codes, scales, like: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Numbers of codes `[BLOCK_N, HALF]` times scales `[BLOCK_N, HALF / GROUP]`."""
    repeated = tl.broadcast_to(scales[:, :, None], (BLOCK_N, HALF // GROUP, GROUP)).reshape(BLOCK_N, HALF)
    return numbers_of(codes, like, INTERPRETED) * (repeated.to(tl.float32) if INTERPRETED else repeated)


@Launcher
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def fp4_skinny_gemm(
    x_ptr, codes_ptr, scale_ptr, row_scale_ptr, part_ptr, M, K, PADDED, ROWS, blocks_per_split,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Partial sums `part [splits, M, ROWS]` float32 of 16-bit `x [M, K]` and weights `[ROWS, K]`: bytes of two codes
    `[ROWS, PADDED / 2]`, as `Fp4Linear` has them, with scales `[ROWS, PADDED / GROUP]` of x's type and float32 scales
    of rows. Numbers times scales have 6 bits, which are exact in 16, so only sums are rounded."""
    HALF: tl.constexpr = BLOCK_K // 2
    n, split, m = split_tile(BLOCK_N, BLOCK_M)
    like = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, PADDED // BLOCK_K), num_stages=STAGES):
        lane, group = tl.arange(0, HALF), tl.arange(0, HALF // GROUP)
        pairs = load_tile(codes_ptr, n[:, None], (block * HALF + lane)[None, :], ROWS, PADDED // 2).to(tl.int32)
        for half in tl.static_range(2):
            k = block * BLOCK_K + half * HALF
            scales = load_tile(scale_ptr, n[:, None], (k // GROUP + group)[None, :], ROWS, PADDED // GROUP)
            x = load_tile(x_ptr, m[None, :], (k + lane)[:, None], M, K)
            weight = scaled_numbers(pairs >> 4 * half & 15, scales, like, BLOCK_N, HALF, GROUP, INTERPRETED)
            total = multiply(weight, x, total, INTERPRETED)
    total *= tl.load(row_scale_ptr + n, mask=n < ROWS, other=0.0)[:, None]
    store_sums(part_ptr, total, split, m[None, :], n[:, None], M, ROWS)


@dataclass(frozen=True, slots=True)
class Fp4Linear(PackedLinear):
    """A weight `[N, K]` of 4-bit floats, K padded to whole blocks.

    Attributes:
        codes: uint8 `[N, P / 2]`: of every 128 inputs the first 64 in the low halves of 64 bytes, the others in the
            high halves.
        scales: `[N, P / group]`, in the dtype of activations.
        row_scales: float32 `[N]`.
        bias: `[N]`, or None.
        inputs: K.
        num_processors: of the GPU.
    """

    codes: Tensor
    scales: Tensor
    row_scales: Tensor
    bias: Tensor | None
    inputs: int
    num_processors: int

    @cached_property
    def _products(self) -> dict[int, SplitProduct]:
        """Prepared launches, by `tile_tokens`."""
        return {}

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.row_scales.nbytes

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout()

    def product(self, x: QuantizedInput) -> PartialSums:
        size = tile_tokens(x.rows.shape[0])
        if size not in self._products:
            self._products[size] = self._prepare(size)
        return PartialSums(self._products[size](x.rows), len(self.codes), self.bias)

    def _prepare(self, tokens: int) -> SplitProduct:
        (rows, half), tile = self.codes.shape, skinny_tile(tokens)
        splits, blocks_per_split = split_inputs(rows, 2 * half, tokens, tile, self.num_processors)
        kernel = fp4_skinny_gemm.bind(
            codes_ptr=self.codes, scale_ptr=self.scales, row_scale_ptr=self.row_scales, K=self.inputs, PADDED=2 * half,
            ROWS=rows, blocks_per_split=blocks_per_split, GROUP=2 * half // self.scales.shape[1], **tile,
            INTERPRETED=triton.knobs.runtime.interpret,
        )  # fmt: skip
        return SplitProduct(kernel, rows, cdiv(rows, tile["BLOCK_N"]), splits, tile["BLOCK_M"])


def padded(inputs: int) -> int:
    """Number of inputs with those that fill the last block."""
    return cdiv(inputs, BLOCK) * BLOCK


def packed_halves(codes: Tensor) -> Tensor:
    """Bytes `[N, P / 2]` of codes `[N, K]` below 16, as `Fp4Linear` has them."""
    rows, inputs = codes.shape
    filled = torch.zeros(rows, padded(inputs), dtype=torch.uint8, device=codes.device)
    filled[:, :inputs] = codes
    low, high = filled.view(rows, -1, 2, HALF).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def padded_scales(scales: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Scales `[N, P / group]` in `dtype` of those `[N, K / group]`, zeros for groups that are not there."""
    rows, groups = scales.shape
    filled = torch.zeros(rows, padded(inputs) * groups // inputs, dtype=dtype, device=scales.device)
    filled[:, :groups] = scales
    return filled

"""Products of 16-bit activations with 4-bit codes of a table of numbers (e2m1, NF4, levels of iq4_nl).

Groups of codes share a scale.

Weight-only on every GPU: also on those that multiply 4-bit floats themselves, which would have to round activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.fused_linear import PartialSums, QuantizedInput, finished
from runtime.backends.triton.kernels.common import (
    load_tile,
    multiply,
    prefetch_rows,
    split_tile,
    store_sums,
    store_tile,
    wait_for_inputs,
)
from runtime.backends.triton.kernels.fp8 import skinny_tile
from runtime.backends.triton.kernels.int8_gemm import split_inputs, tile_tokens
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.split_product import SplitProduct
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.panels import EXPANDED_ROWS, Expander, multiply_by_panels
from runtime.backends.triton.product_times import NEVER
from runtime.backends.triton.sizes import cdiv

BLOCK = 128
"""Inputs of one pass of the loop."""
HALF = BLOCK // 2
"""Inputs whose codes are in the low halves of bytes, and that follow in the high halves; fewer where groups are whose
scales multiply sums."""


@triton.jit
def numbers_of(
    pairs, half: tl.constexpr, like: tl.constexpr, VALUES: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Numbers of the codes in one half of bytes, as floats of type `like`; the interpreter, which knows no PTX, takes
    float32."""
    if INTERPRETED:
        codes = pairs.to(tl.int32) >> 4 * half & 15
        numbers = codes.to(tl.float32)
        for code in tl.static_range(16):
            numbers = tl.where(codes == code, VALUES[code], numbers)
        return numbers
    elif like == tl.bfloat16:
        return tl.inline_asm_elementwise(PTX[half], "=r,=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(PTX[half], "=r,=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=4)


@Launcher
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def fp4_skinny_gemm(
    x_ptr, codes_ptr, scale_ptr, row_scale_ptr, part_ptr, M, K, PADDED, ROWS, blocks_per_split,
    VALUES: tl.constexpr, PTX: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """Partial sums `part [splits, M, ROWS]` float32 of 16-bit `x [M, K]` and weights `[ROWS, K]`: bytes of two codes
    `[ROWS, PADDED / 2]`, as `Fp4Linear` has them, with scales `[ROWS, PADDED / GROUP]` and float32 scales of rows.
    VALUES are the numbers of codes as x's type holds them, PTX looks them up. Scales of groups of HALF multiply float32
    sums; those of smaller groups, of x's type, multiply numbers: e2m1 times scales has 6 bits, exact in 16."""
    n, split, m = split_tile(BLOCK_N, BLOCK_M)
    first = split * blocks_per_split
    if WAITS:
        prefetch_rows(codes_ptr, n, first * (BLOCK_K // 2), ROWS, PADDED // 2)
    wait_for_inputs(WAITS)
    like = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, tl.minimum(first + blocks_per_split, PADDED // BLOCK_K), num_stages=STAGES):
        lane, group = tl.arange(0, HALF), tl.arange(0, HALF // GROUP)
        for place in tl.static_range(0, BLOCK_K // 2, HALF):
            byte = block * (BLOCK_K // 2) + place
            pairs = load_tile(codes_ptr, n[:, None], (byte + lane)[None, :], ROWS, PADDED // 2)
            for half in tl.static_range(2):
                k = 2 * byte + half * HALF
                scales = load_tile(scale_ptr, n[:, None], (k // GROUP + group)[None, :], ROWS, PADDED // GROUP)
                x = load_tile(x_ptr, m[None, :], (k + lane)[:, None], M, K)
                numbers = numbers_of(pairs, half, like, VALUES, PTX, INTERPRETED)
                if GROUP == HALF:
                    sums = multiply(numbers, x, tl.zeros((BLOCK_N, BLOCK_M), tl.float32), INTERPRETED)
                    total += sums * scales.to(tl.float32)
                else:
                    repeated = tl.broadcast_to(scales[:, :, None], (BLOCK_N, HALF // GROUP, GROUP))
                    repeated = repeated.reshape(BLOCK_N, HALF)
                    weight = numbers * (repeated.to(tl.float32) if INTERPRETED else repeated)
                    total = multiply(weight, x, total, INTERPRETED)
    total *= tl.load(row_scale_ptr + n, mask=n < ROWS, other=0.0)[:, None]
    store_sums(part_ptr, total, split, m[None, :], n[:, None], M, ROWS)


@Launcher
@triton.jit
def expand_fp4(
    codes_ptr, scale_ptr, row_scale_ptr, weight_ptr, first_row, ROWS, K, PADDED,
    VALUES: tl.constexpr, PTX: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantizes rows from `first_row` on into `weight [ROWS, K]`, of codes and scales as `fp4_skinny_gemm` has them.
    Programs (bytes of HALF, rows)."""
    row, byte = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * HALF
    n, stop = first_row + row, first_row + ROWS
    lane, group = tl.arange(0, HALF), tl.arange(0, HALF // GROUP)
    pairs = load_tile(codes_ptr, n[:, None], (byte + lane)[None, :], stop, PADDED // 2)
    row_scale = tl.load(row_scale_ptr + n, mask=row < ROWS, other=0.0)
    for half in tl.static_range(2):
        k = 2 * byte + half * HALF
        scales = load_tile(scale_ptr, n[:, None], (k // GROUP + group)[None, :], stop, PADDED // GROUP)
        scales = scales.to(tl.float32) * row_scale[:, None]
        repeated = tl.broadcast_to(scales[:, :, None], (BLOCK_N, HALF // GROUP, GROUP)).reshape(BLOCK_N, HALF)
        numbers = numbers_of(pairs, half, weight_ptr.dtype.element_ty, VALUES, PTX, INTERPRETED)
        store_tile(weight_ptr, numbers.to(tl.float32) * repeated, row[:, None], (k + lane)[None, :], ROWS, K)


@dataclass(frozen=True, slots=True)
class Fp4Linear(PackedLinear):
    """A weight `[N, K]` of 4-bit codes, K padded to whole blocks.

    Attributes:
        codes: uint8 `[N, P / 2]`: of every `2 * half` inputs the first half in the low halves of bytes, the others in
            the high halves.
        scales: `[N, P / group]`, in the dtype of activations, or in any where `half` is a group.
        row_scales: float32 `[N]`.
        bias: `[N]`, or None.
        inputs: K.
        num_processors: of the GPU.
        values: of the 16 codes; rounded to `dtype`.
        dtype: of activations, bfloat16 or float16.
        half: inputs, 64 or 32.
        panel_from: tokens from which dense panels are multiplied.
    """

    codes: Tensor
    scales: Tensor
    row_scales: Tensor
    bias: Tensor | None
    inputs: int
    num_processors: int
    values: tuple[float, ...]
    dtype: torch.dtype
    half: int = HALF
    panel_from: int = NEVER

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.row_scales.nbytes

    def product(self, x: QuantizedInput) -> PartialSums:
        if len(x.rows) >= self.panel_from:
            return finished(multiply_by_panels(x.rows, len(self.codes), self.bias, self.expand_rows))
        size = tile_tokens(x.rows.shape[0])
        if size not in self._products:
            self._products[size] = self._prepare(size)
        return PartialSums(self._products[size](x.rows), len(self.codes), self.bias)

    @cached_property
    def expand_rows(self) -> Expander:
        """Prepared launches that dequantize rows."""
        kernel = expand_fp4.bind(
            codes_ptr=self.codes, scale_ptr=self.scales, row_scale_ptr=self.row_scales, K=self.inputs,
            PADDED=2 * self.codes.shape[1], **self._constants, BLOCK_N=EXPANDED_ROWS, num_warps=4,
        )  # fmt: skip
        return Expander(kernel, self.codes.shape[1] // self.half)

    @property
    def _constants(self) -> dict[str, Any]:
        return {
            "VALUES": rounded_to(self.values, self.dtype),
            "PTX": look_up_instructions(self.values, self.dtype),
            "GROUP": 2 * self.codes.shape[1] // self.scales.shape[1],
            "HALF": self.half,
            "INTERPRETED": triton.knobs.runtime.interpret,
        }

    def _prepare(self, tokens: int) -> SplitProduct:
        rows, inputs, tile = len(self.codes), 2 * self.codes.shape[1], skinny_tile(tokens)
        splits, blocks_per_split = split_inputs(rows, inputs, tokens, tile, self.num_processors)
        kernel = fp4_skinny_gemm.bind(
            codes_ptr=self.codes, scale_ptr=self.scales, row_scale_ptr=self.row_scales, K=self.inputs, PADDED=inputs,
            ROWS=rows, blocks_per_split=blocks_per_split, **tile, **self._constants,
        )  # fmt: skip
        return SplitProduct(kernel, rows, cdiv(rows, tile["BLOCK_N"]), splits, tile["BLOCK_M"])


def rounded_to(values: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    """The nearest numbers that a dtype holds."""
    return tuple(torch.tensor(values, dtype=torch.float64).to(dtype).tolist())


@cache
def look_up_instructions(values: tuple[float, ...], dtype: torch.dtype) -> tuple[str, str]:
    """PTX for each half of bytes: a word of four bytes in, the 16-bit floats of their codes out. A byte permute looks
    the low or the high bytes of four floats up among those of eight codes."""
    stored = torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.uint8).view(16, 2).T.contiguous()
    looked_up = [_look_up(name, words) for name, words in zip("lh", stored.view(torch.int32).tolist(), strict=True)]
    parts = " ".join((SELECT, *looked_up, "prmt.b32 $0, l, h, 0x5140; prmt.b32 $1, l, h, 0x7362;"))
    low, high = "shl.b32 k, $2, 4; mov.b32 c, $2;", "mov.b32 k, $2; shr.u32 c, $2, 4;"
    of_low, of_high = (f"{{ .reg .b32 c, s, k, a, b, l, h; {first} {parts} }}" for first in (low, high))
    return of_low, of_high


SELECT = (
    "prmt.b32 k, k, 0, 0xba98; and.b32 c, c, 0x07070707; shr.u32 s, c, 4; or.b32 s, s, c; prmt.b32 s, s, 0, 0x4420;"
)
"""From four codes c and a word k whose bytes begin with their top bits: k, those in all bits of each byte, and s, the
other bits as a selector of four bytes of eight."""


def _look_up(name: str, words: list[int]) -> str:
    """One byte of four floats, of which `words` holds those of 16 codes; of the upper eight where k has ones."""
    if not any(words):
        return f"mov.b32 {name}, 0;"
    first, second, third, fourth = (f"0x{word & 0xFFFFFFFF:08x}" for word in words)
    either = f"prmt.b32 a, {first}, {second}, s; prmt.b32 b, {third}, {fourth}, s;"
    return f"{either} lop3.b32 {name}, a, b, k, 0xd8;"


def padded(inputs: int) -> int:
    """Number of inputs with those that fill the last block."""
    return cdiv(inputs, BLOCK) * BLOCK


def packed_halves(codes: Tensor, half: int = HALF) -> Tensor:
    """Bytes `[N, P / 2]` of codes `[N, K]` below 16, as `Fp4Linear` has them."""
    rows, inputs = codes.shape
    filled = torch.zeros(rows, padded(inputs), dtype=torch.uint8, device=codes.device)
    filled[:, :inputs] = codes
    low, high = filled.view(rows, -1, 2, half).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def padded_scales(scales: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Scales `[N, P / group]` in `dtype` of those `[N, K / group]`, zeros for groups that are not there."""
    rows, groups = scales.shape
    filled = torch.zeros(rows, padded(inputs) * groups // inputs, dtype=dtype, device=scales.device)
    filled[:, :groups] = scales
    return filled

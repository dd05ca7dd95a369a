"""Products with trellis codes (EXL3), which are decoded into dense panels for any number of tokens: a product that
decodes in registers took 2.6 ms for one token of 28672x4096 on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from runtime.backends.triton.kernels.common import store_tile
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.panels import EXPANDED_ROWS, Expander, multiply_by_panels

TURN = 128
"""Order of the Hadamard matrices, which divides both sides of the tiles."""
SIDE = 16
"""Side of a tile."""
BLOCK = 64
"""Inputs of a program that decodes."""


@triton.jit
def upper_half(hashed):
    """float32 of the float16 numbers in the upper halves of words, of which 0x3b60 is changed: their exponents lie
    between 12 and 15."""
    moved = (hashed.to(tl.int32, bitcast=True) >> 3) & -0x7E002000
    return (moved ^ 0x3F6C0000).to(tl.float32, bitcast=True)


@triton.jit
def number_of(state, CODEBOOK: tl.constexpr):
    """float32 numbers of states (uint32, below 2 ** 16), rounded to float16: codebooks in the order of `CODEBOOKS`."""
    if CODEBOOK == 2:
        hashed = state * 0x83DCD12D
        total = (hashed & 255) + (hashed >> 8 & 255) + (hashed >> 16 & 255) + (hashed >> 24)
        exact = (total.to(tl.int32) + 1024).to(tl.float32) * 0.00676727294921875 - 10.3828125
    else:
        hashed = state * 0xCBAC1FED if CODEBOOK == 1 else state * 89226354 + 64248484
        exact = upper_half(hashed) + upper_half(hashed << 16)
    return exact.to(tl.float16).to(tl.float32)


@triton.jit
def states_of(words_ptr, n, k, N, BITS: tl.constexpr):
    """The 16 bits that end with the code of outputs n and inputs k, uint32: tiles `[K / 16, N / 16, 8 * BITS]` of words
    whose highest bit comes first."""
    WORDS: tl.constexpr = 8 * BITS
    thread = n % 8 * 4 + k % 8 // 2
    code = thread * 8 + k % 2 + k // 8 % 2 * 2 + n // 8 % 2 * 4
    first = (code * BITS + (BITS - 16 + 32 * WORDS)) % (32 * WORDS)
    tile_ptr = words_ptr + (k // 16 * (N // 16) + n // 16).to(tl.int64) * WORDS
    high = tl.load(tile_ptr + first // 32).to(tl.uint32, bitcast=True).to(tl.uint64)
    low = tl.load(tile_ptr + (first // 32 + 1) % WORDS).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32 | low) >> (48 - first % 32).to(tl.uint64)).to(tl.uint32) & 0xFFFF


@Launcher
@triton.jit
def expand_trellis(
    words_ptr, weight_ptr, first_row, ROWS, K, N,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Decodes rows from `first_row` on into `weight [ROWS, K]`, of tiles of numbers that stand for `[N, K]`. Blocks
    divide ROWS and K. Programs (inputs, rows)."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    numbers = number_of(states_of(words_ptr, (first_row + row)[:, None], k[None, :], N, BITS), CODEBOOK)
    store_tile(weight_ptr, numbers, row[:, None], k[None, :], ROWS, K)


@dataclass(frozen=True)
class TrellisLinear:
    """A weight `[N, K]` of trellis codes.

    Attributes:
        words: int32 `[K / 16, N / 16, 8 * bits]`, as stored, K and N rounded up to multiples of 128.
        in_scales: float32 `[K]`, a part of the turns' norm included.
        out_scales: float32 `[N]`.
        turn: float32 `[128, 128]`, the Hadamard matrix of 1 and -1.
        bias: `[N]`, or None.
        bits: of a code.
        codebook: index in `CODEBOOKS`.
    """

    words: Tensor
    in_scales: Tensor
    out_scales: Tensor
    turn: Tensor
    bias: Tensor | None
    bits: int
    codebook: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.words, self.in_scales, self.out_scales, self.turn))

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, K] -> [M, N]` in the dtype of `x`, bfloat16 or float16, in which numbers and turned inputs meet."""
        inputs, outputs = (tiles * SIDE for tiles in self.words.shape[:2])
        scaled, padding = x.float() * self.in_scales, inputs - len(self.in_scales)
        turned = self._turned(pad(scaled, (0, padding)) if padding else scaled).to(x.dtype)
        sums = multiply_by_panels(turned, outputs, None, self.expand_rows).float()
        y = self._turned(sums)[:, : len(self.out_scales)] * self.out_scales
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    @cached_property
    def expand_rows(self) -> Expander:
        """Prepared launches that decode rows."""
        inputs, outputs = (tiles * SIDE for tiles in self.words.shape[:2])
        kernel = expand_trellis.bind(
            words_ptr=self.words, K=inputs, N=outputs, BITS=self.bits, CODEBOOK=self.codebook, BLOCK_N=EXPANDED_ROWS,
            BLOCK_K=BLOCK, num_warps=4,
        )  # fmt: skip
        return Expander(kernel, inputs // BLOCK)

    def _turned(self, x: Tensor) -> Tensor:
        """Every 128 numbers times the Hadamard matrix."""
        return (x.unflatten(1, (-1, TURN)) @ self.turn).flatten(1)

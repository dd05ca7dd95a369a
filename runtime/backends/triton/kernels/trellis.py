"""Products with trellis codes (EXL3) that are decoded in registers from their packed words, for few tokens or many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from runtime.backends.triton.kernels.common import load_tile, split_tile, store_sums
from runtime.backends.triton.kernels.int8_gemm import split_inputs, tile_tokens
from runtime.backends.triton.kernels.split_product import SplitProduct
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.sizes import cdiv

TURN = 128
"""Order of the Hadamard matrices, which divides both sides of the tiles."""
SIDE = 16
"""Side of a tile."""
MOST_TOKENS = 64
"""Tokens of a program."""


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
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def trellis_skinny_gemm(
    x_ptr, words_ptr, part_ptr, M, K, N, blocks_per_split,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Partial sums `part [splits, M, N]` float32 of float32 `x [M, K]` and tiles of numbers that stand for `[N, K]`.

    Numbers have 11 bits, which TF32 holds; x is rounded to as many, and sums are float32. Blocks divide N and K."""
    n, split, m = split_tile(BLOCK_N, BLOCK_M)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * blocks_per_split
    for block in range(first, tl.minimum(first + blocks_per_split, K // BLOCK_K)):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, m[None, :], k[:, None], M, K)
        weight = number_of(states_of(words_ptr, n[:, None], k[None, :], N, BITS), CODEBOOK)
        total = tl.dot(weight, x, total, input_precision="tf32")
    store_sums(part_ptr, total, split, m[None, :], n[:, None], M, N)


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
        num_processors: of the GPU.
    """

    words: Tensor
    in_scales: Tensor
    out_scales: Tensor
    turn: Tensor
    bias: Tensor | None
    bits: int
    codebook: int
    num_processors: int

    @cached_property
    def _products(self) -> dict[int, SplitProduct]:
        """Prepared launches, by `tile_tokens`."""
        return {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.words, self.in_scales, self.out_scales, self.turn))

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, K] -> [M, N]` in the dtype of `x`."""
        size = tile_tokens(x.shape[0])
        if size not in self._products:
            self._products[size] = self._prepare(size)
        scaled, padding = x.float() * self.in_scales, len(self.words) * SIDE - len(self.in_scales)
        turned = self._turned(pad(scaled, (0, padding)) if padding else scaled)
        sums = self._products[size](turned).sum(0)
        y = self._turned(sums)[:, : len(self.out_scales)] * self.out_scales
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    def _turned(self, x: Tensor) -> Tensor:
        """Every 128 numbers times the Hadamard matrix."""
        return (x.unflatten(1, (-1, TURN)) @ self.turn).flatten(1)

    def _prepare(self, tokens: int) -> SplitProduct:
        inputs, outputs = (tiles * SIDE for tiles in self.words.shape[:2])
        tile = {"BLOCK_N": 64, "BLOCK_M": min(MOST_TOKENS, max(16, tokens)), "BLOCK_K": 32, "num_warps": 4}
        splits, blocks_per_split = split_inputs(outputs, inputs, tokens, tile, self.num_processors)
        kernel = trellis_skinny_gemm.bind(
            words_ptr=self.words, K=inputs, N=outputs, blocks_per_split=blocks_per_split, BITS=self.bits,
            CODEBOOK=self.codebook, **tile,
        )  # fmt: skip
        return SplitProduct(kernel, outputs, cdiv(outputs, tile["BLOCK_N"]), splits, tile["BLOCK_M"])

"""Products with trellis codes (EXL3), which are decoded into dense panels for any number of tokens.

A kernel that decoded codes in registers took 348 us for one token and 195 us for 16 (28672x4096 on an H200), where a
panel is decoded and multiplied by 64 tokens in 182 us (docs/measurements/gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.kernels.common import rounded, store_tile, wait_for_inputs
from runtime.backends.triton.kernels.rope_kv_write import hadamard
from runtime.backends.triton.launcher import BoundKernel, Launcher
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
def hash_of(state, CODEBOOK: tl.constexpr):
    """Words of states (uint32, below 2 ** 16), of which numbers are made."""
    if CODEBOOK == 2:
        return state * 0x83DCD12D
    else:
        return state * 0xCBAC1FED if CODEBOOK == 1 else state * 89226354 + 64248484


@triton.jit
def number_of(state, CODEBOOK: tl.constexpr):
    """float32 numbers of states, rounded to float16: codebooks in the order of `CODEBOOKS`."""
    hashed = hash_of(state, CODEBOOK)
    if CODEBOOK == 2:
        total = (hashed & 255) + (hashed >> 8 & 255) + (hashed >> 16 & 255) + (hashed >> 24)
        exact = (total.to(tl.int32) + 1024).to(tl.float32) * 0.00676727294921875 - 10.3828125
    else:
        exact = upper_half(hashed) + upper_half(hashed << 16)
    return exact.to(tl.float16).to(tl.float32)


HALVES_ADDED = (
    "{ .reg .b32 t, u; lop3.b32 t, $1, 0x8fff8fff, 0x3b603b60, 0x6a; prmt.b32 u, t, t, 0x1032; add.rn.f16x2 $0, t, u; }"
)
"""PTX of `number_of` for the first two codebooks: a hash in, its number as float16 in both halves of a word out."""


@triton.jit
def number_in(
    window, place: tl.constexpr, CODEBOOK: tl.constexpr, PTX: tl.constexpr, like: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Numbers, as type `like`, of the states that begin at a bit of words of 64 bits, the highest being 0."""
    state = (window >> (48 - place)).to(tl.uint32) & 0xFFFF
    if INTERPRETED:
        return rounded(number_of(state, CODEBOOK), like, INTERPRETED)
    elif CODEBOOK == 2:
        return number_of(state, CODEBOOK).to(like)
    else:
        hashed = hash_of(state, CODEBOOK)
        both = tl.inline_asm_elementwise(PTX, "=r,r", [hashed], dtype=tl.int32, is_pure=True, pack=1)
        return both.to(tl.int16).to(tl.float16, bitcast=True).to(like)


@triton.jit
def decoded_tiles(
    words_ptr, tile_k, tile_n, N, PAIR_BITS: tl.constexpr, CODEBOOK: tl.constexpr, PTX: tl.constexpr,
    like: tl.constexpr, TILES_K: tl.constexpr, TILES_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Numbers `[16 * TILES_N, 16 * TILES_K]`, as type `like`, of tiles `[K / 16, N / 16, 4 * PAIR_BITS]` of words
    whose highest bit comes first. Two codes have PAIR_BITS bits, the first of them half of these, rounded down.

    A tile is a matrix as the threads of a warp hold it for a product: of thread t the codes `8 t ... 8 t + 7` are those
    of outputs `t / 4` and 8 more, and of inputs `2 (t % 4)`, the next one, and 8 more than both. Their states lie in
    one stretch of bits, so they take two or three words from memory.
    """
    WORDS: tl.constexpr = 4 * PAIR_BITS
    OWN: tl.constexpr = PAIR_BITS // 2
    LAST: tl.constexpr = WORDS - OWN
    first = (tl.arange(0, 32) * WORDS + (OWN - 16 + 32 * WORDS)) % (32 * WORDS)
    tile_ptr = words_ptr + (tile_k.to(tl.int64)[:, None] * (N // 16) + tile_n[None, :])[:, :, None] * WORDS
    place, shift = (first // 32)[None, None, :], (first % 32).to(tl.uint64)[None, None, :]
    first_word = tl.load(tile_ptr + place).to(tl.uint32, bitcast=True).to(tl.uint64)
    second_word = tl.load(tile_ptr + (place + 1) % WORDS).to(tl.uint32, bitcast=True).to(tl.uint64)
    window = (first_word << 32 | second_word) << shift
    rest = window
    if PAIR_BITS == 6 or PAIR_BITS == 7 or PAIR_BITS > 8:
        third_word = tl.load(tile_ptr + (place + 2) % WORDS).to(tl.uint32, bitcast=True).to(tl.uint64)
        window = window | third_word >> (32 - shift)
        rest = (second_word << 32 | third_word) << shift
    # The stretch of wide codes is longer than a window: the last ones are found in the one that begins 32 bits later.
    FROM: tl.constexpr = 32 if LAST > 48 else 0
    n0 = number_in(window, 0, CODEBOOK, PTX, like, INTERPRETED)
    n1 = number_in(window, PAIR_BITS - OWN, CODEBOOK, PTX, like, INTERPRETED)
    n2 = number_in(window, 3 * PAIR_BITS // 2 - OWN, CODEBOOK, PTX, like, INTERPRETED)
    n3 = number_in(window, 2 * PAIR_BITS - OWN, CODEBOOK, PTX, like, INTERPRETED)
    n4 = number_in(window, 5 * PAIR_BITS // 2 - OWN, CODEBOOK, PTX, like, INTERPRETED)
    n5 = number_in(window, 3 * PAIR_BITS - OWN, CODEBOOK, PTX, like, INTERPRETED)
    n6 = number_in(window, 7 * PAIR_BITS // 2 - OWN, CODEBOOK, PTX, like, INTERPRETED)
    n7 = number_in(rest if LAST > 48 else window, LAST - FROM, CODEBOOK, PTX, like, INTERPRETED)
    low = tl.join(tl.join(n0, n1), tl.join(n2, n3))
    high = tl.join(tl.join(n4, n5), tl.join(n6, n7))
    numbers = tl.reshape(tl.join(low, high), (TILES_K, TILES_N, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(numbers, (1, 6, 2, 0, 5, 3, 4)), (16 * TILES_N, 16 * TILES_K))


@Launcher
@triton.jit
def expand_trellis(
    words_ptr, weight_ptr, first_row, ROWS, K, N,
    PAIR_BITS: tl.constexpr, CODEBOOK: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Decodes rows from `first_row` on into `weight [ROWS, K]`, of tiles of numbers that stand for `[N, K]`. Blocks
    divide ROWS and K. Programs (inputs, rows)."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile_n = first_row // 16 + tl.program_id(1) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    tile_k = tl.program_id(0) * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)
    numbers = decoded_tiles(
        words_ptr, tile_k, tile_n, N, PAIR_BITS, CODEBOOK, PTX, weight_ptr.dtype.element_ty, BLOCK_K // 16,
        BLOCK_N // 16, INTERPRETED,
    )  # fmt: skip
    store_tile(weight_ptr, numbers, row[:, None], k[None, :], ROWS, K)


@Launcher
@triton.jit(do_not_specialize=["M"])
def turn_inputs(
    x_ptr, scale_ptr, out_ptr, M, K, PADDED, TURN: tl.constexpr, INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False
):
    """`x [M, K]` times scales `[K]`, every TURN numbers times the Hadamard matrix, to `out [M, PADDED]`. Programs
    (token, turn)."""
    wait_for_inputs(WAITS)
    m, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * TURN + tl.arange(0, TURN)
    x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    turned = hadamard(x * tl.load(scale_ptr + k, mask=k < K, other=0.0), TURN, 1.0)
    like = out_ptr.dtype.element_ty
    tl.store(out_ptr + m * PADDED + k, rounded(turned, like, INTERPRETED).to(like))


@Launcher
@triton.jit(do_not_specialize=["M"])
def turn_sums(
    sum_ptr, scale_ptr, bias_ptr, y_ptr, M, N, PADDED, TURN: tl.constexpr, HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """Every TURN sums of `[M, PADDED]` times the Hadamard matrix, times scales `[N]`, plus the bias, to `y [M, N]`.
    Programs (token, turn)."""
    wait_for_inputs(WAITS)
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * TURN + tl.arange(0, TURN)
    y = hadamard(tl.load(sum_ptr + m * PADDED + n).to(tl.float32), TURN, 1.0)
    y *= tl.load(scale_ptr + n, mask=n < N, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    like = y_ptr.dtype.element_ty
    tl.store(y_ptr + m * N + n, rounded(y, like, INTERPRETED).to(like), mask=n < N)


@dataclass(frozen=True)
class TrellisLinear:
    """A weight `[N, K]` of trellis codes.

    Attributes:
        words: int32 `[K / 16, N / 16, 4 * pair_bits]`, as stored, K and N rounded up to multiples of 128.
        in_scales: float32 `[K]`, a part of the turns' norm included.
        out_scales: float32 `[N]`.
        bias: `[N]`, or None.
        pair_bits: of two codes.
        codebook: index in `CODEBOOKS`.
    """

    words: Tensor
    in_scales: Tensor
    out_scales: Tensor
    bias: Tensor | None
    pair_bits: int
    codebook: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.words, self.in_scales, self.out_scales))

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, K] -> [M, N]` in the dtype of `x`, bfloat16 or float16, as are numbers and turned inputs."""
        turn, turn_back = self._turns
        tokens, (inputs, outputs) = len(x), self._sizes
        turned, y = x.new_empty(tokens, inputs), x.new_empty(tokens, len(self.out_scales))
        turn((tokens, inputs // TURN), x.contiguous(), turned, tokens)
        turn_back((tokens, outputs // TURN), multiply_by_panels(turned, outputs, None, self.expand_rows), y, tokens)
        return y

    @property
    def _sizes(self) -> tuple[int, int]:
        """Inputs and outputs, filled up."""
        return self.words.shape[0] * SIDE, self.words.shape[1] * SIDE

    @cached_property
    def _turns(self) -> tuple[BoundKernel, BoundKernel]:
        (inputs, outputs), bias = self._sizes, self.bias
        given = {"TURN": TURN, "INTERPRETED": triton.knobs.runtime.interpret, "num_warps": 1}
        return (
            turn_inputs.bind(scale_ptr=self.in_scales, K=len(self.in_scales), PADDED=inputs, **given),
            turn_sums.bind(
                scale_ptr=self.out_scales, bias_ptr=bias, N=len(self.out_scales), PADDED=outputs,
                HAS_BIAS=bias is not None, **given,
            ),
        )  # fmt: skip

    @cached_property
    def expand_rows(self) -> Expander:
        """Prepared launches that decode rows."""
        inputs, outputs = self._sizes
        kernel = expand_trellis.bind(
            words_ptr=self.words, K=inputs, N=outputs, **self._constants, BLOCK_N=EXPANDED_ROWS, BLOCK_K=BLOCK,
            num_warps=4,
        )  # fmt: skip
        return Expander(kernel, inputs // BLOCK)

    @property
    def _constants(self) -> dict[str, Any]:
        interpreted = triton.knobs.runtime.interpret
        return {"PAIR_BITS": self.pair_bits, "CODEBOOK": self.codebook, "PTX": HALVES_ADDED, "INTERPRETED": interpreted}

"""Rounding inside of kernels, bit for bit as torch rounds: to 16 bits, to whole numbers, to e4m3 and back."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl


@triton.jit
def rounded(x, like: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 `x` as the nearest numbers of type `like`, still in float32. The interpreter would cut bfloat16 off."""
    if INTERPRETED and like == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(like).to(tl.float32)


@triton.jit
def nearest(x):
    """Whole numbers int32 next to float32 `x` of at most 2 ** 21; halves go to the even one. One addition rounds, as
    1.5 * 2 ** 23 leaves no room for a fraction."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def to_fp8(x):
    """Bits (int32) of the e4m3 numbers next to float32 `x` of at most 448. Works on GPUs without 8-bit floats."""
    bits = x.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 numbers are 2 ** -9 apart, which is what one addition to 2 ** 14 leaves.
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return sign | tl.where(size < 0x3C800000, tiny, normal)


@triton.jit
def from_fp8(codes, INTERPRETED: tl.constexpr, like):
    """Bytes of e4m3 as numbers, exactly: their bits moved into a float32, whose exponent is then put right. Works on
    GPUs without 8-bit floats."""
    bits = (codes.to(tl.int32) & 0x80) << 24 | (codes.to(tl.int32) & 0x7F) << 20
    numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return numbers if INTERPRETED else numbers.to(like)


@triton.jit
def to_float16(x):
    """float32 `x` rounded to float16 and saturated, still in float32; what is not finite becomes NaN."""
    inside = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), inside, float("nan"))


@triton.jit
def largest(x):
    """The largest magnitude in `x [n]`; infinite when something is not a number."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)


LINE = tl.constexpr(128)
"""Bytes that a GPU reads of its memory at once."""
PREFETCHED = tl.constexpr(8)
"""Tiles or lines of a row that are read before a kernel waits: 32 KiB of 4-bit codes in a program of 64 rows."""
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
"""PTX that reads a line into the second-level cache; its result is not used."""


@triton.jit
def prefetch(pointers):
    """Reads lines at pointers into the second-level cache. Gives no numbers, so it cannot be too early."""
    tl.inline_asm_elementwise(PREFETCH, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_rows(pointer, row, first, ROWS, COLUMNS):
    """Prefetches lines of rows of a matrix `[ROWS, COLUMNS]` of bytes, from column `first` on."""
    column = tl.minimum(first + tl.arange(0, PREFETCHED) * LINE, COLUMNS - 1)
    prefetch(pointer + tl.minimum(row, ROWS - 1).to(tl.int64)[:, None] * COLUMNS + column[None, :])


@triton.jit
def wait_for_inputs(WAITS: tl.constexpr):
    """Where kernels overlap: waits until all before this one have written, then lets the next one start. Stands before
    everything else in a kernel but prefetches of weights, which stay the same."""
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def split_tile(BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows `[BLOCK_N]` of a weight, split of its inputs, and tokens `[BLOCK_M]` of a program (rows, split, tokens)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    return n, tl.program_id(1), m


@triton.jit
def grouped_tile(M, N, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows `[BLOCK_N]` of a weight with N and tokens `[BLOCK_M]` of M. Neighbouring programs share weights: GROUP_M
    blocks of tokens are walked before the next block of rows."""
    program, blocks_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP_M * blocks_n) * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    m = (first + program % (GROUP_M * blocks_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % (GROUP_M * blocks_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return n, m


@triton.jit
def load_tile(pointer, row, column, ROWS, COLUMNS):
    """Elements of a matrix `[ROWS, COLUMNS]`, zeros beyond it. One of `row` and `column` stands, `[n, 1]`, the other
    lies, `[1, k]`."""
    return tl.load(pointer + row.to(tl.int64) * COLUMNS + column, mask=(row < ROWS) & (column < COLUMNS), other=0)


@triton.jit
def store_tile(pointer, tile, row, column, ROWS, COLUMNS):
    """Stores a tile in the matrix's own dtype, except what lies beyond it; `row` and `column` as of `load_tile`."""
    inside = (row < ROWS) & (column < COLUMNS)
    tl.store(pointer + row.to(tl.int64) * COLUMNS + column, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_sums(part_ptr, sums, split, m, n, M, N):
    """Stores a tile of sums of tokens m and rows n into `part [splits, M, N]`."""
    store_tile(part_ptr + split.to(tl.int64) * M * N, sums, m, n, M, N)


@cache
def unpack_instructions(bits: int, is_bfloat16: bool) -> tuple[str, ...]:
    """PTX for each plane: two packed words in, two 16-bit floats of `code_offset` + code out."""
    of_plane = _signed_byte(is_bfloat16) if bits == 8 else _code_in_float(bits, is_bfloat16)
    shifted = "{ .reg .b32 w; shr.u32 w, $1, SHIFT; OF_PLANE }".replace("OF_PLANE", of_plane.replace("$1", "w"))
    return (of_plane, *(shifted.replace("SHIFT", str(shift)) for shift in range(bits, 16, bits)))


def _code_in_float(bits: int, is_bfloat16: bool) -> str:
    """One `lop3` puts a code into the bits of 128 or, in float16, 1024."""
    mask, pattern = (1 << bits) - 1, 0x4300 if is_bfloat16 else 0x6400
    return f"lop3.b32 $0, $1, {_twice(mask)}, {_twice(pattern)}, 0xea;"


def _signed_byte(is_bfloat16: bool) -> str:
    """A signed byte as an exact float: 1024 + 128 more than it, less 1152, or in bfloat16, which has 8 bits, 128 + its
    low 7 bits, less 128 or, where the sign bit is in the exponent, 256."""
    if not is_bfloat16:
        byte = f"lop3.b32 t, $1, {_twice(0xFF)}, {_twice(0x6480)}, 0x6a;"
        return f"{{ .reg .b32 t, u; {byte} mov.b32 u, {_twice(0xE480)}; add.rn.f16x2 $0, t, u; }}"
    low = f"lop3.b32 t, $1, {_twice(0x7F)}, {_twice(0x4300)}, 0xea;"
    sign = f"lop3.b32 u, $1, {_twice(0x80)}, {_twice(0xC300)}, 0xea;"
    return f"{{ .reg .b32 t, u, one; {low} {sign} mov.b32 one, {_twice(0x3F80)}; fma.rn.bf16x2 $0, t, one, u; }}"


@cache
def float8_instructions(is_bfloat16: bool) -> tuple[str, ...]:
    """PTX for each plane: two words of two e4m3 bytes in, two 16-bit floats out, exactly. The bits of a byte below its
    sign move to the same place of a 16-bit float, whose exponent one product puts right."""
    place, factor = (4, 0x7B80) if is_bfloat16 else (7, 0x5C00)  # of 2 ** 120 and 2 ** 8
    moves = f"shl.b32 n, $1, {place}; shl.b32 s, $1, 8;", f"shr.u32 n, $1, {8 - place}; mov.b32 s, $1;"
    joined = f"and.b32 n, n, {_twice(0x7F << place)}; lop3.b32 n, s, {_twice(0x8000)}, n, 0xea;"
    kind = "bf16x2" if is_bfloat16 else "f16x2"
    # Minus zero keeps the sign of a product that is zero.
    product = f"mov.b32 f, {_twice(factor)}; mov.b32 z, {_twice(0x8000)}; fma.rn.{kind} $0, n, f, z;"
    return tuple(f"{{ .reg .b32 n, s, f, z; {move} {joined} {product} }}" for move in moves)


def _twice(pattern: int) -> str:
    """Bits of both halves of a word."""
    return f"0x{pattern << 16 | pattern:08x}"


@triton.jit
def code_offset(BITS: tl.constexpr, BFLOAT16: tl.constexpr):
    """Distance of unpacked floats from their codes."""
    return -128.0 if BITS == 8 else (128.0 if BFLOAT16 else 1024.0)


@triton.jit
def unpack(
    words, plane: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr
):
    """One plane of `words [n, 32]` as floats of `code_offset` + code. The interpreter knows no PTX."""
    if INTERPRETED:
        codes = (words.to(tl.int32) >> (plane * BITS)) & ((1 << BITS) - 1)
        codes = codes ^ 128 if BITS == 8 else codes
        return codes.to(tl.float32) + code_offset(BITS, BFLOAT16)
    elif BFLOAT16:
        return tl.inline_asm_elementwise(PTX[plane], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(PTX[plane], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def multiply(a, b, total, INTERPRETED: tl.constexpr):
    """`total + a b` with float32 sums; the interpreter is silently wrong on bfloat16, so it gets float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)

"""How packed codes become numbers inside a kernel: one instruction per two weights, and no rounding.

A code is put into the mantissa of a 16-bit float whose exponent makes it `offset + code` exactly: 128 + code in
bfloat16, 1024 + code in float16. The offset is taken off the float32 sum, where it costs nothing per weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BFLOAT16 = (0x4300, 128.0)
_FLOAT16 = (0x6400, 1024.0)


def magic(is_bfloat16: bool) -> tuple[int, float]:
    """The bits that a code is put into, and the offset of what comes out."""
    return _BFLOAT16 if is_bfloat16 else _FLOAT16


def unpack_instructions(bits: int, is_bfloat16: bool) -> tuple[str, ...]:
    """PTX for each plane: two packed words in, two 16-bit floats out, by one `lop3` behind the shift."""
    mask = (1 << bits) - 1
    pattern = magic(is_bfloat16)[0]
    select = f"0x{mask << 16 | mask:08x}, 0x{pattern << 16 | pattern:08x}, 0xea;"
    first = f"lop3.b32 $0, $1, {select}"
    shifted = "{{ .reg .b32 t; shr.u32 t, $1, {}; lop3.b32 $0, t, {} }}"
    return (first, *(shifted.format(shift, select) for shift in range(bits, 16, bits)))


@triton.jit
def unpack(
    words, plane: tl.constexpr, BITS: tl.constexpr, BFLOAT16: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr
):
    """One plane of `words [n, 32]` as floats of offset + code. The interpreter knows no PTX."""
    if INTERPRETED:
        codes = (words.to(tl.int32) >> (plane * BITS)) & ((1 << BITS) - 1)
        return codes.to(tl.float32) + (128.0 if BFLOAT16 else 1024.0)
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

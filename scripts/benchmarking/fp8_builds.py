"""The builds of the products with 8-bit floats; those of many tokens exist where a GPU multiplies such floats."""

from __future__ import annotations

from benchmarking.kernel_builds import TENSOR_CORES, Build
from runtime.backends.triton.kernels.fp8 import WIDE_TILE
from runtime.backends.triton.kernels.int8 import byte_tile

NATIVE_ARCHITECTURE = 89
NARROW_TOKENS = (1, 32, 64)
DTYPES = ("bf16", "fp16")


def fp8_builds(arch: int) -> list[Build]:
    narrow = [
        _narrow(arch, dtype, rounds, tokens) for dtype in DTYPES for rounds in (False, True) for tokens in NARROW_TOKENS
    ]
    if arch < NATIVE_ARCHITECTURE:
        return narrow
    return narrow + [_wide(arch, dtype, has_bias) for dtype in DTYPES for has_bias in (False, True)]


def _narrow(arch: int, dtype: str, rounds_inputs: bool, tokens: int) -> Build:
    tile, form = byte_tile(tokens, 0), "x8" if rounds_inputs else "x16"
    native = {"LEVELS": rounds_inputs, "NATIVE": arch >= NATIVE_ARCHITECTURE, "INTERPRETED": False}
    return Build.of(
        arch, f"narrow_fp8_product {form} {dtype} {tile['BLOCK_N']}x{tile['BLOCK_M']}", "fp8.narrow_fp8_product",
        f"x:{'u8' if rounds_inputs else dtype} codes:u8 row_scale:{dtype} part:fp32",
        "M K%16 ROWS%16 blocks_per_split", native | tile, wants=TENSOR_CORES,
    )  # fmt: skip


def _wide(arch: int, dtype: str, has_bias: bool) -> Build:
    return Build.of(
        arch, f"wide_fp8_product {dtype}{' bias' if has_bias else ''}", "fp8.wide_fp8_product",
        f"levels:u8 codes:u8 token_scale:fp32 row_scale:{dtype} bias:{dtype} y:{dtype}", "M K%16 ROWS%16",
        {"HAS_BIAS": has_bias, "INTERPRETED": False, **WIDE_TILE}, wants=("QGMMA",) if arch == 90 else ("QMMA",),
    )  # fmt: skip

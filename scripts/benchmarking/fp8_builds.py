"""The builds of the products with 8-bit floats; those of many tokens exist where a GPU multiplies such floats."""

from __future__ import annotations

from typing import Any

from benchmarking.kernel_builds import TENSOR_CORES, Build

NATIVE_ARCHITECTURE = 89
NARROW_TILES = (16, 32, 64)
DTYPES = ("bf16", "fp16")


def fp8_builds(arch: int) -> list[Build]:
    inputs = [(f"x16 {dtype}", dtype, dtype) for dtype in DTYPES] + [("x8", "u8", "bf16")]
    narrow = [_narrow(arch, *each, block_m) for each in inputs for block_m in NARROW_TILES]
    return narrow + [_wide(arch, dtype) for dtype in DTYPES if arch >= NATIVE_ARCHITECTURE]


def _narrow(arch: int, name: str, x: str, scale: str, block_m: int) -> Build:
    constants: dict[str, Any] = {
        "LEVELS": x == "u8", "BLOCK_N": 64, "BLOCK_M": block_m, "BLOCK_K": 128, "STAGES": 4,
        "NATIVE": arch >= NATIVE_ARCHITECTURE, "INTERPRETED": False,
    }  # fmt: skip
    return Build.of(
        arch, f"narrow_fp8_product {name} 64x{block_m}", "gpu.fp8.narrow_fp8_product",
        f"x:{x} codes:u8 row_scale:{scale} part:fp32", "M K%16 ROWS%16 blocks_per_split",
        constants, 4, 4, wants=TENSOR_CORES,
    )  # fmt: skip


def _wide(arch: int, dtype: str) -> Build:
    return Build.of(
        arch, f"wide_fp8_product {dtype} 128x128", "gpu.fp8.wide_fp8_product",
        f"levels:u8 codes:u8 token_scale:fp32 row_scale:{dtype} bias:{dtype} y:{dtype}", "M K%16 ROWS%16",
        {"HAS_BIAS": True, "BLOCK_N": 128, "BLOCK_M": 128, "BLOCK_K": 128, "GROUP_M": 8, "STAGES": 3,
         "INTERPRETED": False},
        8, 3, wants=("QGMMA",) if arch == 90 else ("QMMA",),
    )  # fmt: skip

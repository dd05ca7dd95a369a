"""The builds of the packed linears: every default configuration, width and dtype, with the group sizes that matter."""

from __future__ import annotations

from typing import Any

from benchmarking.kernel_builds import TENSOR_CORES, Build
from runtime.kernels.gpu.configs import EXPAND, NARROW, KernelConfig, all_configs
from runtime.kernels.gpu.planes import unpack_instructions

DTYPES = ("bf16", "fp16")
FORMATS = ((4, 128, 128, False), (4, 32, 32, True), (4, 0, 128, False), (2, 64, 64, True))
"""Bits, group size (0: the row), unit, and whether zero points are stored."""


def linear_builds(arch: int) -> list[Build]:
    planes = [
        _planes(arch, config, dtype, *form) for form in FORMATS for config in all_configs(form[0]) for dtype in DTYPES
    ]
    return planes + [each for dtype in DTYPES for each in _bytes(arch, dtype)] + _levels(arch)


def _planes(
    arch: int, config: KernelConfig, dtype: str, bits: int, group_size: int, unit: int, has_zero: bool
) -> Build:
    is_bfloat16 = dtype == "bf16"
    constants: dict[str, Any] = {
        "BITS": bits, "GROUP_SIZE": group_size, "UNIT": unit, "MIDPOINT": 1 << bits - 1, "HAS_ZERO": has_zero,
        "BFLOAT16": is_bfloat16, "PTX": unpack_instructions(bits, is_bfloat16), "INTERPRETED": False,
    }  # fmt: skip
    name = f"{config.kernel} w{bits}g{group_size or 'row'}{'z' if has_zero else ''} {dtype}"
    pointers = f"words:i16 scale:{dtype} zero:u8 "
    if config.kernel == EXPAND:
        integers, constants["BLOCK_N"] = "first_row%16 ROWS%16 N%16 K%16", 64
        return Build.of(arch, name, "gpu.wide.expand", pointers + f"weight:{dtype}", integers, constants)
    constants |= {"BLOCK_N": config.block_n, "BLOCK_M": config.block_m, "STAGES": config.num_stages, "EVEN_K": True}
    name += f" {config.block_n}x{config.block_m} {config.num_warps} warps {config.num_stages} stages"
    if config.kernel == NARROW:
        kernel, integers = "gpu.narrow.narrow_product", "M N%16 K%16 num_tiles tiles_per_split"
        pointers += f"x:{dtype} sums:fp32 part:fp32"
    else:
        kernel, integers = "gpu.wide.wide_product", "M N%16 K%16 ROWS%16 num_tiles"
        pointers += f"x:{dtype} bias:{dtype} y:{dtype}"
        constants |= {"HAS_BIAS": False, "GROUP_M": 8}
    shape = config.num_warps, config.num_stages
    return Build.of(arch, name, kernel, pointers, integers, constants, *shape, wants=TENSOR_CORES)


def _bytes(arch: int, dtype: str) -> list[Build]:
    return [
        Build.of(
            arch, f"byte_product g{group or 'row'} {dtype} 64x{block_m}", "gpu.bytes.byte_product",
            f"x:{dtype} codes:i8 scale:{dtype} zero:i8 part:fp32", "M N%16 K%16 ROWS%16 blocks_per_split",
            {"GROUP_SIZE": group, "HAS_ZERO": group != 0, "BLOCK_N": 64, "BLOCK_M": block_m, "BLOCK_K": group or 128,
             "STAGES": 4, "INTERPRETED": False},
            4, 4, wants=TENSOR_CORES, converts=True,
        )
        for group in (0, 128, 32)
        for block_m in (16, 32, 64)
    ]  # fmt: skip


def _levels(arch: int) -> list[Build]:
    return [
        Build.of(
            arch, f"level_product {block_m}x{block_n}", "gpu.bytes.level_product", "levels:i8 codes:i8 part:i32",
            "M K%16 ROWS%16 blocks_per_split",
            {"BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": 128, "GROUP_M": 8, "STAGES": 3},
            warps, 3, wants=("IMMA", "IGMMA"),
        )
        for block_m, block_n, warps in ((16, 64, 4), (32, 64, 4), (64, 64, 4), (128, 128, 8))
    ]  # fmt: skip

"""The builds of the packed linears: every default configuration, width and dtype, with the group sizes that matter, and
what is tried when a table is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Any

from benchmarking.kernel_builds import TENSOR_CORES, Build
from benchmarking.linear_candidates import candidates
from runtime.backends.triton.kernels.configs import BUCKETS, EXPAND, NARROW, KernelConfig, all_configs
from runtime.backends.triton.kernels.dequant import unpack_instructions
from runtime.backends.triton.kernels.int8 import byte_tile, level_tile
from runtime.backends.triton.kernels.w4a16 import GROUP_M
from runtime.backends.triton.kernels.weight_layout import tile_inputs

DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Form:
    """A packed weight: width of its codes, group size (0: the row), whether zero points are stored, whether the linear
    has a bias, and whether its inputs fill the last tile."""

    bits: int
    group_size: int
    has_zero: bool = False
    has_bias: bool = False
    even: bool = True

    def __str__(self) -> str:
        marks = "z" * self.has_zero + " bias" * self.has_bias + " ragged" * (not self.even)
        return f"w{self.bits}g{self.group_size or 'row'}{marks}"


MEASURED = Form(4, 128)
"""What tables are measured with."""
FORMS = (
    MEASURED,
    Form(4, 64, has_bias=True),
    Form(4, 32, True),
    Form(4, 32, has_bias=True, even=False),
    Form(4, 0),
    Form(2, 128, has_bias=True),
    Form(2, 64, True),
    Form(2, 32, even=False),
    Form(2, 0, True, has_bias=True),
)
GROUPS = ((0, False), (0, True), (128, True), (64, False), (32, True))
"""Group sizes of bytes, and whether zero points are stored."""
NARROW_TOKENS = (1, 32, 64)


def linear_builds(arch: int) -> list[Build]:
    planes = [_planes(arch, *each) for form in FORMS for each in product(all_configs(form.bits), DTYPES, [form])]
    known = set(all_configs(MEASURED.bits))
    tried = [_planes(arch, config, DTYPES[0], MEASURED, tried=True) for config in _tried() if config not in known]
    codes = [_bytes(arch, *each) for each in product(DTYPES, GROUPS, NARROW_TOKENS)]
    return planes + tried + codes + [_levels(arch, tokens) for tokens in (*NARROW_TOKENS, 65)]


def _tried() -> list[KernelConfig]:
    return list(dict.fromkeys(replace(config, splits=1) for tokens in BUCKETS for config in candidates(tokens)))


def _planes(arch: int, config: KernelConfig, dtype: str, form: Form, tried: bool = False) -> Build:
    constants: dict[str, Any] = {
        "BITS": form.bits, "GROUP_SIZE": form.group_size, "UNIT": gcd(form.group_size, tile_inputs(form.bits)),
        "MIDPOINT": 1 << form.bits - 1, "HAS_ZERO": form.has_zero, "BFLOAT16": dtype == "bf16",
        "PTX": unpack_instructions(form.bits, dtype == "bf16"), "INTERPRETED": False,
    }  # fmt: skip
    name, pointers = (
        f"{config.kernel} {form} {dtype}",
        f"words:i16 scale:{dtype} zero:{'u8' if form.has_zero else 'i16'} ",
    )
    if config.kernel == EXPAND:
        integers, constants["BLOCK_N"] = "first_row%16 ROWS%16 N%16 K%16", 64
        return Build.of(arch, name, "w4a16.expand", pointers + f"weight:{dtype}", integers, constants)
    name += f" {config.block_n}x{config.block_m} {config.num_warps} warps {config.num_stages} stages"
    constants |= {
        "BLOCK_N": config.block_n, "BLOCK_M": config.block_m, "STAGES": config.num_stages, "EVEN_K": form.even,
        "num_warps": config.num_warps,
    }  # fmt: skip
    rules = {"wants": TENSOR_CORES, "tried": tried}
    if config.kernel == NARROW:
        integers, pointers = "M N%16 K%16 num_tiles tiles_per_split", pointers + f"x:{dtype} sums:fp32 part:fp32"
        return Build.of(arch, name, "w4a16.narrow_product", pointers, integers, constants, **rules)
    constants |= {"HAS_BIAS": form.has_bias, "GROUP_M": GROUP_M}
    pointers += f"x:{dtype} bias:{dtype} y:{dtype}"
    return Build.of(arch, name, "w4a16.wide_product", pointers, "M N%16 K%16 ROWS%16 num_tiles", constants, **rules)


def _bytes(arch: int, dtype: str, group: tuple[int, bool], tokens: int) -> Build:
    (group_size, has_zero), tile = group, byte_tile(tokens, group[0])
    return Build.of(
        arch, f"byte_product g{group_size or 'row'}{'z' * has_zero} {dtype} {tile['BLOCK_N']}x{tile['BLOCK_M']}",
        "int8.byte_product", f"x:{dtype} codes:i8 scale:{dtype} zero:i8 part:fp32",
        "M K%16 ROWS%16 blocks_per_split",
        {"GROUP_SIZE": group_size, "HAS_ZERO": has_zero, "INTERPRETED": False, **tile},
        wants=TENSOR_CORES, converts=True,
    )  # fmt: skip


def _levels(arch: int, tokens: int) -> Build:
    tile = level_tile(tokens)
    return Build.of(
        arch, f"level_product {tile['BLOCK_M']}x{tile['BLOCK_N']}", "int8.level_product",
        "levels:i8 codes:i8 part:i32", "M K%16 ROWS%16 blocks_per_split", tile, wants=("IMMA", "IGMMA"),
    )  # fmt: skip

"""Counts what the main loops of GPU kernels cost from their machine code for sm_90, without a GPU.

For each kernel as an 8B model with 4-bit weights launches it: issue slots, plain loads and asynchronous copies in the
loop, registers, shared memory, programs at once and bytes in flight. Speeds are in docs/gpu-kernels.md, measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarking.gpu.builds import disassembled
from benchmarking.gpu.kernels import last_tokens
from benchmarking.gpu.sass import LoopFigures, Resources, Tile, figures, main_loop
from benchmarking.gpu.without_gpu import H200, Build, gpu_without_hardware
from benchmarking.tables import Row, print_with_markdown, write_json
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.codebooks import NF4_VALUES
from compress.checkpoint.weights.mxfp4 import VALUES
from compress.checkpoint.weights.nonlinear import LEVEL_VALUES

PROCESSORS = H200.gpu.processors
SHAPES = ((4096, 4096), (28672, 4096))
"""Small and wide layers of an 8B model, which take tiles of 64 and of 128 rows."""
TOKENS = (1, 8, 16, 32, 64, 128, 256, 2048)
INT4, INT8 = Int(4, 128), Int(8, None)
SMALL_GROUPS = (64, 32)
INT8_TOKENS = (1, 16, 64, 128, 2048)
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
CONTEXT = 4096


PAGE_BITS = (16, 8, 8, 4)
"""Bits of an element, by the form of pages as `paged_attention` numbers them."""
TILES: Mapping[str, Callable[[Mapping[str, Any]], Tile]] = {
    "w4a16_skinny_gemm": lambda c: Tile((c["BLOCK_N"], 512 // c["BITS"]), c["BITS"], c["BLOCK_M"]),
    "w4a16_gemm": lambda c: Tile((c["BLOCK_N"], 512 // c["BITS"]), c["BITS"], c["BLOCK_M"]),
    "grouped_w4a16_gemm": lambda c: Tile((c["BLOCK_N"], 512 // c["BITS"]), c["BITS"], c["BLOCK_M"]),
    "expand": lambda c: Tile((c["BLOCK_N"], 512 // c["BITS"]), c["BITS"]),
    "fp8_skinny_gemm": lambda c: Tile((c["BLOCK_N"], c["BLOCK_K"]), 8, c["BLOCK_M"]),
    "fp4_skinny_gemm": lambda c: Tile((c["BLOCK_N"], c["BLOCK_K"]), 4, c["BLOCK_M"]),
    "paged_attention": lambda c: Tile((2, c["BLOCK_T"], c["HEAD_DIM"]), PAGE_BITS[c["KEY_FORM"]], c["BLOCK_R"]),
}
"""By kernel, from the compile-time arguments of a launch."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields calls of host wrappers, with names; each launches one kernel of `TILES` or more."""
    for rows, inputs in SHAPES:
        for tokens in TOKENS:
            yield f"int4 {rows}x{inputs}, M={tokens}", lambda r=rows, k=inputs, t=tokens: weight_only(r, k, t)
    for group, tokens in product(SMALL_GROUPS, (32, 64)):
        scheme = Int(4, group)
        yield f"int4 g{group} 4096x4096, M={tokens}", lambda s=scheme, t=tokens: weight_only(4096, 4096, t, s)
    for tokens in INT8_TOKENS:
        yield f"int8 4096x4096, M={tokens}", lambda t=tokens: weight_only(4096, 4096, t, INT8)
        yield f"fp8 4096x4096, M={tokens}", lambda t=tokens: fp8(t)
        yield f"fp8 blocks 4096x4096, M={tokens}", lambda t=tokens: fp8(t, 128)
        yield f"mxfp8 4096x4096, M={tokens}", lambda t=tokens: fp8(t, 32)
        yield f"nvfp4 4096x4096, M={tokens}", lambda t=tokens: fp4(t, VALUES, 16)
        yield f"nf4 4096x4096, M={tokens}", lambda t=tokens: fp4(t, NF4_VALUES, 64)
        yield f"iq4_nl 4096x4096, M={tokens}", lambda t=tokens: fp4(t, LEVEL_VALUES, 32, 32)
    for tokens in (1, 16, 64):
        yield f"q4_k 4096x4096, M={tokens}", lambda t=tokens: block_integers(t)
    for rows in (8, 16, 64):
        yield f"int4 experts, blocks of {rows}", lambda r=rows: experts(r)
    for cache in ("16bit", "int8", "int4"):
        for rows in (16, 64):
            yield f"{cache} pages, {rows} rows", lambda c=cache, r=rows: attention(c, r)


def packed(rows: int, inputs: int, scheme: Int = INT4) -> Any:
    """A weight with bfloat16 scales."""
    from compress.checkpoint.weights.integer import IntegerWeight
    from runtime.backends.triton.kernels.weight_layout import interleave

    codes, groups = empty(rows, inputs, dtype=torch.uint8), scheme.num_groups(inputs)
    weight = IntegerWeight(codes, empty(rows, groups), empty(rows, groups, dtype=torch.uint8), scheme)
    return interleave(weight, torch.device("meta"))


def weight_only(rows: int, inputs: int, tokens: int, scheme: Int = INT4) -> None:
    from runtime.backends.triton.fused_linear import QuantizedInput
    from runtime.backends.triton.kernels.configs import default_plan
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear

    weight = packed(rows, inputs, scheme)
    scaled = weight.unit if weight.group_size else 0
    linear = W4A16Linear(weight, None, default_plan(weight.bits, rows, len(weight.words), PROCESSORS, scaled))
    beside = empty(inputs // weight.unit, tokens, dtype=torch.float32)
    linear.product(QuantizedInput(empty(tokens, inputs), beside if linear.activation_layout(tokens).num_sums else None))


def block_integers(tokens: int) -> None:
    """Launches a product with 4-bit codes whose scales and minima are float32."""
    from runtime.backends.triton.fused_linear import QuantizedInput
    from runtime.backends.triton.kernels.block_integers import skinny_plan
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear
    from runtime.backends.triton.kernels.weight_layout import interleave_codes

    codes, scales = empty(4096, 4096, dtype=torch.uint8), empty(4096, 4096 // 32, dtype=torch.float32)
    weight = interleave_codes(codes, scales, scales, 4, 32, codes.device)
    linear = W4A16Linear(weight, None, skinny_plan(weight.bits, 4096, len(weight.words), PROCESSORS))
    sums = empty(4096 // weight.unit, tokens, dtype=torch.float32)
    linear.product(QuantizedInput(empty(tokens, 4096), sums))


def fp8(tokens: int, group: int = 0) -> None:
    """Launches a product with 8-bit floats and scales of rows, and of groups of inputs if there are."""
    from runtime.backends.triton.fused_linear import QuantizedInput
    from runtime.backends.triton.kernels.fp8 import Fp8Linear

    codes, scales = empty(4096, 4096, dtype=torch.uint8), (empty(4096), None)
    if group:
        scales = empty(4096, dtype=torch.float32), empty(4096, 4096 // group, dtype=torch.float32)
    linear = Fp8Linear(codes, *scales, None, False, True, PROCESSORS, torch.bfloat16, group)
    linear.product(QuantizedInput(empty(tokens, 4096)))


def fp4(tokens: int, values: tuple[float, ...], group: int, half: int = 64) -> None:
    """Launches a product with codes of a table, and float32 scales where bytes hold codes of groups of 32."""
    from runtime.backends.triton.fused_linear import QuantizedInput
    from runtime.backends.triton.kernels.fp4 import Fp4Linear

    codes, row_scales = empty(4096, 2048, dtype=torch.uint8), empty(4096, dtype=torch.float32)
    scales = empty(4096, 4096 // group, dtype=torch.bfloat16 if half == 64 else torch.float32)
    linear = Fp4Linear(codes, scales, row_scales, None, 4096, PROCESSORS, values, torch.bfloat16, half)
    linear.product(QuantizedInput(empty(tokens, 4096)))


def experts(block_m: int) -> None:
    from runtime.backends.triton.kernels.grouped_gemm import GroupedWeight, RowBlocks

    grouped = GroupedWeight([packed(1536, 2048)] * 8)
    indices = empty(8 * block_m, dtype=torch.int32), empty(8, dtype=torch.int32)
    grouped.product(empty(8 * block_m, 2048), RowBlocks(*indices, 8 * block_m), 1)


def attention(cache: str, rows: int) -> None:
    from compress.checkpoint.kv_cache import KVCacheScheme
    from runtime.backends.triton.attention import HeadPages
    from runtime.backends.triton.kernels.paged_attention import attend
    from runtime.backends.triton.tiling import Tiling

    scheme, tokens = KVCacheScheme.named(cache), rows // (HEADS // KV_HEADS)
    width, dtype = HEAD_DIM // 2 if cache == "int4" else HEAD_DIM, torch.bfloat16 if scheme.is_exact else torch.uint8
    pages, scales = empty(64, PAGE, KV_HEADS, width, dtype=dtype), empty(64, PAGE, KV_HEADS, 2, dtype=torch.float16)
    formats = scheme.key_format, scheme.value_format
    read = HeadPages((pages, pages), (pages, pages) if scheme.is_exact else (scales, scales), formats, scheme.rotate)
    ragged = last_tokens(empty(1, CONTEXT // PAGE, dtype=torch.int64), tokens, CONTEXT)
    tiling = Tiling(rows, HEADS // KV_HEADS, KV_HEADS, 2 * PROCESSORS)
    attend(empty(tokens, HEADS, HEAD_DIM), read, ragged, tiling)


def build_of(call: Callable[[], object]) -> Build | None:
    """The build of a kernel of `TILES` that a call launches; None where it launches none."""
    with gpu_without_hardware(H200) as gpu:
        call()
    return next((build for build in gpu.builds if build.kernel in TILES), None)


def counted(build: Build) -> tuple[LoopFigures, Resources]:
    """Counts the main loop of a build."""
    usage, code = disassembled(build.cubin.read_bytes())
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    takes = Resources(registers, build.shared_bytes, stack, build.num_warps)
    return figures(main_loop(code), tile_of(build), takes), takes


def tile_of(build: Build) -> Tile:
    return TILES[build.kernel](dict(build.constants))


def description(build: Build) -> str:
    """Tile, warps and stages."""
    tile = tile_of(build)
    sizes = (*tile.size[-2:], tile.others) if tile.others else tile.size
    return f"{'x'.join(map(str, sizes))}, {build.num_warps}w {dict(build.constants).get('STAGES', 1)}st"


def row_of(name: str, build: Build, found: LoopFigures, takes: Resources) -> Row:
    return {
        "launch": name,
        "kernel": build.kernel,
        "tile": description(build),
        "slots": f"{found.slots_per_element:.2f}",
        "LDG": f"{found.loads:g}",
        "LDGSTS": f"{found.copies:g}",
        "registers": str(takes.registers),
        "shared, KiB": f"{takes.shared_bytes / 1024:.0f}",
        "stack, bytes": str(takes.stack_bytes),
        "programs": str(takes.programs),
        "in flight, KiB": f"{found.bytes_in_flight / 1024:.0f}",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="launches whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here")


def run(options: argparse.Namespace) -> int:
    import triton

    console, rows, content = Console(width=200, highlight=False), [], {}
    for name, call in calls():
        build = build_of(call) if options.only in name else None
        if build is not None:
            found, takes = counted(build)
            rows.append(row_of(name, build, found, takes))
            content[name] = {"kernel": build.kernel, "tile": description(build), **asdict(found), **asdict(takes)}
    if not rows:
        console.print(f"no launch has {options.only!r} in its name")
        return 1
    print_with_markdown(f"Main loops for sm_{H200.arch}, Triton {triton.__version__}", rows, console)
    if options.json:
        write_json(options.json, {"triton": triton.__version__, "launches": content})
    return 0

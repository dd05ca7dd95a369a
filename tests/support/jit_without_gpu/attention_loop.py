"""Operations of the loop over keys of compiled attention, read from Triton's intermediate code."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from jit_without_gpu.builds import Build
from jit_without_gpu.session import A100, H200, gpu_without_hardware
from runtime.backends.triton.attention import HeadPages
from runtime.backends.triton.tiling import Tiling, tile_rows
from runtime.core.batch import RaggedRows

BLOCK_SIZE, KEYS = 16, 32768
OPERATIONS = re.compile(r"(async_copy_global_to_local|async_wait|convert_layout|tt\.load|tt\.dot|warp_group_dot)\b")
CARDS = {80: A100, 90: H200}


def loop_of_pages(form: str, arch: int, tokens: int) -> list[str]:
    """Operations of the loop of `paged_attention` over one form of pages, 8 kv heads of 128, for sequences with some
    tokens: copies, waits (`async_wait N`, N copies may be under way), conversions, loads and products, in order."""
    with gpu_without_hardware(CARDS[arch]) as gpu:
        from runtime.backends.triton.kernels.paged_attention import attend

        (keys, scales), (values, value_scales) = _pages(form, 8, 128), _pages(form, 8, 128)
        tiling = Tiling(tile_rows(128, 4 * tokens), 4, 8, 792)
        attend(
            _empty(4 * tokens, 32, 128),
            HeadPages((keys, values), (scales, value_scales), (form, form), False),
            _rows(4, tokens),
            tiling,
        )
        return _loop(next(build for build in gpu.builds if build.kernel == "paged_attention"))


def loop_of_latents(form: str, arch: int, rows: int) -> list[str]:
    """The same of `latent_attention` with 128 heads, tiles of some rows."""
    with gpu_without_hardware(CARDS[arch]) as gpu:
        from runtime.backends.triton.kernels.latent_attention import attend_latents
        from runtime.backends.triton.kernels.tile_list import tile_list

        (keys, scales), (latents, latent_scales) = _pages(form, 1, 64), _pages(form, 1, 512)
        step, read = _rows(4, 1), HeadPages((keys, latents), (scales, latent_scales), (form, form), False)
        tiles = tile_list(step, 4, Tiling(rows, 128, 1, 792))
        attend_latents(_empty(128, 4, 512), _empty(4, 128, 64), read, step, tiles, rows, 0.1, None)
        return _loop(next(build for build in gpu.builds if build.kernel == "latent_attention"))


def _pages(form: str, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Pages and their scales."""
    places = KEYS // BLOCK_SIZE, BLOCK_SIZE, heads
    if form == "16bit":
        return (_empty(*places, dim),) * 2
    width, count = dim // 2 if form == "int4" else dim, 1 if form == "fp8" else 2
    return _empty(*places, width, dtype=torch.uint8), _empty(*places, count, dtype=torch.float16)


def _rows(sequences: int, tokens: int) -> RaggedRows:
    sizes = sequences + 1, sequences, sequences * KEYS // BLOCK_SIZE, sequences * tokens
    starts, tables, blocks, positions = (_empty(size, dtype=torch.int64) for size in sizes)
    return RaggedRows(starts, tables, blocks, positions, None, tokens, KEYS)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _loop(build: Build) -> list[str]:
    lines = build.cubin.with_suffix(".ttgir").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if "scf.for" in line)
    end = " " * (len(lines[begin]) - len(lines[begin].lstrip())) + "}"
    stop = next(number for number in range(begin + 1, len(lines)) if lines[number].startswith(end))
    return [_name(found[1], line) for line in lines[begin:stop] if (found := OPERATIONS.search(line))]


def _name(operation: str, line: str) -> str:
    count = re.search(r"num = (\d+)", line)
    return f"{operation} {count[1]}" if count else operation

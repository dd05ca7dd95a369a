"""The builds of attention over pages: every form of keys and values, head size and number of rows, and what else a step
asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarking.kernel_builds import TENSOR_CORES, Build
from compress.checkpoint.kv_cache import EXACT, KV_FORMATS, KVCacheScheme
from runtime.backends.triton.attention import HEAD_DIMS, MAX_SPLITS, block_rows
from runtime.backends.triton.kernels.paged_attention import attention_constants, join_constants

DTYPES = ("bf16", "fp16")
HEADS, KV_HEADS = 32, 8
SPLITS = (1, 8, MAX_SPLITS)
FLAGS = ("windowed", "streaming", "exact", "tree")
SIZES = tuple((head_dim, rows) for rows in block_rows(128) for head_dim in HEAD_DIMS if rows in block_rows(head_dim))
"""Dimensions of a head, and rows of a program."""
Kind = tuple[str, frozenset[str]]
"""Form of keys and values, and flags."""


def attention_builds(arch: int, every: bool = False) -> list[Build]:
    """Pages and flags in every combination, with heads of 128 dimensions and with one of the other sizes, by turns;
    `every`: with all sizes, for both dtypes."""
    kinds = [(cache, flags) for cache in KV_FORMATS for flags in flags_of(cache)]
    chosen = product(DTYPES, SIZES, kinds) if every else _by_turns(kinds)
    pages = [_attention(arch, dtype, size, *kind) for dtype, size, kind in chosen]
    return pages + [_join(arch, *each) for each in product(DTYPES, HEAD_DIMS, SPLITS)]


def _by_turns(kinds: Sequence[Kind]) -> Iterator[tuple[str, tuple[int, int], Kind]]:
    common = [size for size in SIZES if size[0] == 128]
    others = [size for size in SIZES if size[0] != 128]
    for number, kind in enumerate(kinds):
        turn = number + KV_FORMATS.index(kind[0])  # the same flags get other sizes with other pages
        dtypes = DTYPES if kind[0] == EXACT else [DTYPES[turn % len(DTYPES)]]
        yield from product(dtypes, (sizes[turn % len(sizes)] for sizes in (common, others)), [kind])


def flags_of(cache: str) -> list[frozenset[str]]:
    """What a step may ask for: streams have a window, and exact tokens stand beside pages that are not."""
    chosen = [frozenset(flag for flag, on in zip(FLAGS, each, strict=True) if on) for each in product((0, 1), repeat=4)]
    return [
        flags
        for flags in chosen
        if ("streaming" not in flags or "windowed" in flags) and ("exact" not in flags or cache != EXACT)
    ]


def _attention(arch: int, dtype: str, size: tuple[int, int], cache: str, flags: frozenset[str]) -> Build:
    scheme, (head_dim, rows) = KVCacheScheme.named(cache), size
    codes, scales = (dtype, dtype) if scheme.is_exact else ("u8", "fp16")
    constants = attention_constants(
        head_dim, (scheme.key_format, scheme.value_format), rows, **{flag: flag in flags for flag in FLAGS}
    )
    return Build.of(
        arch, " ".join((f"paged_attention {cache} {dtype} D{head_dim} {rows} rows", *sorted(flags))),
        "paged_attention.paged_attention",
        f"query:{dtype} moved:{dtype} keys:{codes} key_scales:{scales} values:{codes} value_scales:{scales} "
        f"exact_keys:{dtype} exact_values:{dtype} exact_slots:i64 blocks:i64 positions:i64 "
        "ancestors:i64 part:fp32 weight:fp32",
        "scale:fp32 query_stride%16 blocks_stride block_size%16 tokens_each rows_each splits window sinks exact",
        {"HEADS": HEADS, "KV_HEADS": KV_HEADS, **constants}, wants=TENSOR_CORES, converts=True,
    )  # fmt: skip


def _join(arch: int, dtype: str, head_dim: int, splits: int) -> Build:
    return Build.of(
        arch, f"join_splits {splits} {dtype} D{head_dim}", "paged_attention.join_splits",
        f"part:fp32 weight:fp32 out:{dtype}", "splits", join_constants(head_dim, splits),
    )  # fmt: skip

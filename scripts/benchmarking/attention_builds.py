"""The builds of attention over pages: every form of keys and values, head sizes, and numbers of rows."""

from __future__ import annotations

from benchmarking.kernel_builds import TENSOR_CORES, Build
from runtime.kernels.gpu.launch_attention import FORMS, block_keys, program_warps

DTYPES = ("bf16", "fp16")
FORM_PAIRS = (("16bit", "16bit"), ("fp8", "fp8"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
SHAPES = ((128, 16), (128, 32), (128, 64), (64, 16), (64, 64))
"""Dimensions of a head, and rows of a program."""


def attention_builds(arch: int) -> list[Build]:
    products = [
        _attention(arch, dtype, forms, head_dim, rows, windowed=rows == 32)
        for forms in FORM_PAIRS
        for head_dim, rows in SHAPES
        for dtype in DTYPES
    ]
    joins = [
        Build.of(
            arch, f"join_splits {splits} {dtype}", "gpu.attention.join_splits", f"part:fp32 weight:fp32 out:{dtype}",
            "splits", {"HEAD_DIM": 128, "SPLITS": splits},
        )
        for splits in (1, 64)
        for dtype in DTYPES
    ]  # fmt: skip
    fronts = [
        _attention(arch, "bf16", forms, 128, rows, windowed=front != "exact", extra=front)
        for forms in FORM_PAIRS
        for front in ("exact", "streaming", "exact streaming")
        for rows in (16, 64)
        if forms != FORM_PAIRS[0] or front == "streaming"
    ]
    trees = [
        _attention(arch, "bf16", forms, 128, rows, windowed=windowed, extra=extra)
        for forms in FORM_PAIRS
        for rows in (16, 64)
        for extra, windowed in (("tree", False), ("tree", True), ("streaming tree", True))
    ]
    return products + joins + fronts + trees


def _attention(
    arch: int, dtype: str, forms: tuple[str, str], head_dim: int, rows: int, windowed: bool, extra: str = ""
) -> Build:
    """`extra`: exact and streaming first tokens, and trees of guesses."""
    codes, scales = (dtype, dtype) if forms[0] == "16bit" else ("u8", "fp16")
    name = f"paged_attention {'/'.join(dict.fromkeys(forms))} {dtype} D{head_dim} {rows} rows"
    return Build.of(
        arch, name + (" windowed" if windowed else "") + f" {extra}".rstrip(), "gpu.attention.paged_attention",
        f"query:{dtype} moved:{dtype} keys:{codes} key_scales:{scales} values:{codes} value_scales:{scales} "
        f"exact_keys:{dtype} exact_values:{dtype} exact_slots:i64 blocks:i64 positions:i64 "
        "ancestors:i64 part:fp32 weight:fp32",
        "scale:fp32 query_stride%16 blocks_stride block_size%16 tokens_each rows_each splits window sinks exact",
        {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "KEY_FORM": FORMS[forms[0]], "VALUE_FORM": FORMS[forms[1]],
         "WINDOWED": windowed, "STREAMING": "streaming" in extra, "EXACT": "exact" in extra, "TREE": "tree" in extra,
         "BLOCK_R": rows,
         "BLOCK_T": block_keys(rows), "STAGES": 2, "INTERPRETED": False},
        program_warps(rows, "exact" in extra, "streaming" in extra, "tree" in extra), 2,
        wants=TENSOR_CORES, converts=True,
    )  # fmt: skip

"""The builds of attention over pages: every form of keys and values, head sizes, and numbers of rows."""

from __future__ import annotations

from benchmarking.kernel_builds import TENSOR_CORES, Build
from runtime.kernels.gpu.launch_attention import FORMS, block_keys

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
    return products + joins


def _attention(arch: int, dtype: str, forms: tuple[str, str], head_dim: int, rows: int, windowed: bool) -> Build:
    codes, scales = (dtype, dtype) if forms[0] == "16bit" else ("u8", "fp16")
    name = f"paged_attention {'/'.join(dict.fromkeys(forms))} {dtype} D{head_dim} {rows} rows"
    return Build.of(
        arch, name + (" windowed" if windowed else ""), "gpu.attention.paged_attention",
        f"query:{dtype} keys:{codes} key_scales:{scales} values:{codes} value_scales:{scales} blocks:i64 positions:i64 "
        "part:fp32 weight:fp32",
        "scale:fp32 query_stride%16 blocks_stride block_size%16 tokens_each rows_each splits window",
        {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "KEY_FORM": FORMS[forms[0]], "VALUE_FORM": FORMS[forms[1]],
         "WINDOWED": windowed, "BLOCK_R": rows, "BLOCK_T": block_keys(rows), "STAGES": 2, "INTERPRETED": False},
        4, 2, wants=TENSOR_CORES, converts=True,
    )  # fmt: skip

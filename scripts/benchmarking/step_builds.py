"""The builds of what stands between products: every form of input and of pages, few and many splits, real sizes."""

from __future__ import annotations

from typing import Any

from benchmarking.kernel_builds import Build
from compress.checkpoint.kv_cache import EXACT, KV_FORMATS, KVCacheScheme
from runtime.backends.base import FLOATS, LEVELS, ROWS, SUMS
from runtime.backends.triton.attention import HEAD_DIMS
from runtime.backends.triton.kernels.int8 import MAX_SPLITS, level_tile, split_inputs
from runtime.backends.triton.kernels.norm_act import BLOCK, FORMS, GATED_BLOCK, TYPES, num_warps
from runtime.backends.triton.kernels.paged_attention import FORMS as PAGE_FORMS

DTYPES = dict(zip(("bf16", "fp16"), TYPES.values(), strict=True))
SPLITS = {"16-bit": 1, "parts": MAX_SPLITS, "levels": MAX_SPLITS, "floats": 1}
"""What is read: finished rows, float32 sums of so many splits, or int32 or float32 sums with scales."""
BIASED = ("parts", "levels")
FORM_BLOCKS = tuple((form, block) for form in (ROWS, SUMS, LEVELS, FLOATS) for block in (4096, 8192, 16384))
"""Forms of an input, and numbers in a program that has the whole row."""
PROCESSORS = 132
"""Of an H200; an A100 has fewer."""
UNITS = (32, 64, 128, 256)


def step_builds(arch: int) -> list[Build]:
    return [
        each
        for dtype in DTYPES
        for each in (*_rows(arch, dtype), *_norms(arch, dtype), *_gates(arch, dtype), *_turns(arch, dtype))
    ]


def _rows(arch: int, dtype: str) -> list[Build]:
    blocks = [(SUMS, unit, BLOCK) for unit in UNITS]
    blocks += [(form, 32, block) for form in (LEVELS, FLOATS) for block in (4096, 16384, 32768)]
    before = [
        Build.of(
            arch, f"prepare_rows {form} {unit if form == SUMS else block} {dtype}", "norm_act.prepare_rows",
            f"x:{dtype} {_out(form, dtype)}", "M K%16 num_sums",
            {"FORM": FORMS[form], "UNIT": unit, "BLOCK": block, "num_warps": num_warps(block)}, wide=True,
        )
        for form, unit, block in blocks
    ]  # fmt: skip
    after = [
        Build.of(
            arch, f"finish_rows {kind} {dtype}", "norm_act.finish_rows", f"{_product(kind, dtype)} y:{dtype}",
            "M N%16 ROWS_OUT%16", _constants(kind) | {"BLOCK": BLOCK}, converts=True, wide=True,
        )
        for kind in SPLITS
        if kind != "16-bit"
    ]  # fmt: skip
    return before + after


def _norms(arch: int, dtype: str) -> list[Build]:
    """The first layer has no update to add."""
    updates = [(kind, *each) for kind in (None, *SPLITS) for each in FORM_BLOCKS]
    return [
        Build.of(
            arch, f"add_norm {kind or 'nothing'} to {form} {block} {dtype}", "norm_act.add_norm",
            f"hidden:{dtype} {_product(kind or '16-bit', dtype)} weight:{dtype} {_out(form, dtype)}",
            "eps:fp32 M N%16 K%16 num_sums",
            _constants(kind or "16-bit") | _splits(kind, block) | _form(form, block) | {"HAS_UPDATE": kind is not None},
            converts=True, wide=True,
        )
        for kind, form, block in updates
    ]  # fmt: skip


def level_splits(block: int) -> int:
    """Of products of levels whose rows take a block of that size: the longer a row, the fewer fill a GPU."""
    return split_inputs(block // 2 + 1, 2**16, 1, level_tile(1), PROCESSORS)[0]


def _splits(kind: str | None, block: int) -> dict[str, int]:
    return {"SPLITS": level_splits(block)} if kind == "levels" else {}


def _gates(arch: int, dtype: str) -> list[Build]:
    blocks = [(ROWS, BLOCK), (SUMS, BLOCK), (LEVELS, GATED_BLOCK), (FLOATS, GATED_BLOCK)]
    return [
        Build.of(
            arch, f"gate_rows {kind} to {form} {block} {dtype}", "norm_act.gate_rows",
            f"{_product(kind, dtype)} {_out(form, dtype)}", "M N%16 K%16 num_sums",
            _constants(kind) | _form(form, block) | {"like": DTYPES[dtype], "num_warps": num_warps(2 * block)},
            converts=True, wide=True,
        )
        for kind in SPLITS
        for form, block in blocks
    ]  # fmt: skip


def _turns(arch: int, dtype: str) -> list[Build]:
    """Every two of head size, pages, kind of product, and head norm or none, come together."""
    return [
        _turn(arch, dtype, cache, head_dim, list(SPLITS)[(i + j) % len(SPLITS)], (i + j // 2) % 2 == 0)
        for i, cache in enumerate(KV_FORMATS)
        for j, head_dim in enumerate(HEAD_DIMS)
    ]


def _turn(arch: int, dtype: str, cache: str, head_dim: int, kind: str, normed: bool) -> Build:
    scheme = KVCacheScheme.named(cache)
    codes, scales = (dtype, dtype) if cache == EXACT else ("u8", "fp16")
    return Build.of(
        arch, f"turn_write {kind} to {cache} {dtype} D{head_dim}{' normed' * normed}", "rope_kv_write.turn_write",
        f"{_product(kind, dtype)} norm:{dtype} cos:{dtype} sin:{dtype} slots:i64 query:{dtype} "
        f"keys:{codes} key_scales:{scales} values:{codes} value_scales:{scales}",
        "eps:fp32 M N%16",
        _constants(kind)
        | {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "ROOT": head_dim**0.5, "HEAD_NORM": normed,
           "TURNED": scheme.rotate, "KEY_FORM": PAGE_FORMS[scheme.key_format],
           "VALUE_FORM": PAGE_FORMS[scheme.value_format], "num_warps": 1},
        converts=True, wide=kind != "16-bit" and head_dim > 64,
    )  # fmt: skip


def _product(kind: str, dtype: str) -> str:
    part = {"16-bit": dtype, "levels": "i32"}.get(kind, "fp32")
    is_scaled, has_bias = kind in ("levels", "floats"), kind in BIASED
    token, row = ("fp32", dtype) if is_scaled else (part, part)
    return f"part:{part} bias:{dtype if has_bias else part} token_scale:{token} row_scale:{row}"


def _out(form: str, dtype: str) -> str:
    out = {LEVELS: "i8", FLOATS: "u8"}.get(form, dtype)
    return f"out:{out} beside:{out if form == ROWS else 'fp32'}"


def _form(form: str, block: int) -> dict[str, Any]:
    unit = 128 if form == SUMS else 32
    return {"FORM": FORMS[form], "UNIT": unit, "BLOCK": block, "num_warps": num_warps(block)}


def _constants(kind: str) -> dict[str, Any]:
    return {
        "SPLITS": SPLITS[kind],
        "HAS_BIAS": kind in BIASED,
        "SCALED": kind in ("levels", "floats"),
        "INTERPRETED": False,
    }

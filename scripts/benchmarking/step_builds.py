"""The builds of what stands between products: every form of input and of pages, few and many splits, real sizes."""

from __future__ import annotations

from typing import Any

from benchmarking.attention_builds import FORM_PAIRS
from benchmarking.kernel_builds import Build
from runtime.kernels.gpu.launch_attention import FORMS as PAGE_FORMS
from runtime.kernels.gpu.launch_rows import BLOCK, FORMS, GATED_BLOCK, TYPES, num_warps
from runtime.kernels.handover import FLOATS, LEVELS, ROWS, SUMS

DTYPES = dict(zip(("bf16", "fp16"), TYPES.values(), strict=True))
PRODUCTS = {"16-bit": 1, "parts": 8, "levels": 2, "floats": 2}
"""What is read: finished rows, float32 sums of so many splits, or int32 or float32 sums with scales."""
FORM_BLOCKS = ((ROWS, 8192), (SUMS, 4096), (SUMS, 8192), (LEVELS, 4096), (LEVELS, 8192), (FLOATS, 4096), (FLOATS, 8192))
"""Forms of an input, and numbers in a program that has the whole row."""


def step_builds(arch: int) -> list[Build]:
    return [
        each
        for dtype in DTYPES
        for each in (*_rows(arch, dtype), *_norms(arch, dtype), *_gates(arch, dtype), *_turns(arch, dtype))
    ]


def _rows(arch: int, dtype: str) -> list[Build]:
    blocks = [(SUMS, unit, BLOCK) for unit in (32, 64, 128, 256)]
    blocks += [(form, 32, block) for form in (LEVELS, FLOATS) for block in (4096, 16384)]
    before = [
        Build.of(
            arch, f"prepare_rows {form} {unit if form == SUMS else block} {dtype}", "gpu.rows.prepare_rows",
            f"x:{dtype} {_out(form, dtype)}", "M K%16 num_sums",
            {"FORM": FORMS[form], "UNIT": unit, "BLOCK": block}, num_warps(block), wide=True,
        )
        for form, unit, block in blocks
    ]  # fmt: skip
    after = [
        Build.of(
            arch, f"finish_rows {kind} {dtype}", "gpu.rows.finish_rows", f"{_product(kind, dtype)} y:{dtype}",
            "M N%16 ROWS_OUT%16", _constants(kind) | {"BLOCK": BLOCK}, converts=True, wide=True,
        )
        for kind in PRODUCTS
    ]  # fmt: skip
    return before + after


def _norms(arch: int, dtype: str) -> list[Build]:
    return [
        Build.of(
            arch, f"add_norm {kind} to {form} {block} {dtype}", "gpu.norm.add_norm",
            f"hidden:{dtype} {_product(kind, dtype)} weight:{dtype} {_out(form, dtype)}",
            "eps:fp32 M N%16 K%16 num_sums",
            _constants(kind)
            | {"HAS_UPDATE": True, "FORM": FORMS[form], "UNIT": 128 if form == SUMS else 32, "BLOCK": block},
            num_warps(block), converts=True, wide=True,
        )
        for kind in PRODUCTS
        for form, block in FORM_BLOCKS
    ]  # fmt: skip


def _gates(arch: int, dtype: str) -> list[Build]:
    blocks = {(form, GATED_BLOCK if form in (LEVELS, FLOATS) else BLOCK) for form, _ in FORM_BLOCKS}
    return [
        Build.of(
            arch, f"gate_rows {kind} to {form} {block} {dtype}", "gpu.gate.gate_rows",
            f"{_product(kind, dtype)} {_out(form, dtype)}", "M N%16 K%16 num_sums",
            _constants(kind)
            | {"FORM": FORMS[form], "UNIT": 128 if form == SUMS else 32, "BLOCK": block, "like": DTYPES[dtype]},
            num_warps(block), converts=True, wide=True,
        )
        for kind in PRODUCTS
        for form, block in sorted(blocks)
    ]  # fmt: skip


def _turns(arch: int, dtype: str) -> list[Build]:
    return [
        _turn(arch, dtype, forms, head_dim, kind)
        for forms in FORM_PAIRS
        for head_dim, kind in ((64, "parts"), (128, "16-bit"), (128, "levels"), (256, "parts"))
    ]


def _turn(arch: int, dtype: str, forms: tuple[str, str], head_dim: int, kind: str) -> Build:
    codes, scales = (dtype, dtype) if forms[0] == "16bit" else ("u8", "fp16")
    turned = "int4" in forms
    return Build.of(
        arch, f"turn_write {kind} to {'/'.join(dict.fromkeys(forms))} {dtype} D{head_dim}", "gpu.turn.turn_write",
        f"{_product(kind, dtype)} norm:{dtype} cos:{dtype} sin:{dtype} slots:i64 query:{dtype} "
        f"keys:{codes} key_scales:{scales} values:{codes} value_scales:{scales}",
        "eps:fp32 M N%16",
        _constants(kind)
        | {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "ROOT": head_dim**0.5, "HEAD_NORM": True,
           "TURNED": turned, "KEY_FORM": PAGE_FORMS[forms[0]], "VALUE_FORM": PAGE_FORMS[forms[1]]},
        1, converts=True, wide=kind != "16-bit" and head_dim > 64,
    )  # fmt: skip


def _product(kind: str, dtype: str) -> str:
    part = {"16-bit": dtype, "levels": "i32"}.get(kind, "fp32")
    return f"part:{part} bias:{dtype} token_scale:fp32 row_scale:{dtype}"


def _out(form: str, dtype: str) -> str:
    return f"out:{ {LEVELS: 'i8', FLOATS: 'u8'}.get(form, dtype) } beside:fp32"


def _constants(kind: str) -> dict[str, Any]:
    has_work = kind != "16-bit"
    return {
        "SPLITS": PRODUCTS[kind],
        "HAS_BIAS": has_work,
        "SCALED": kind in ("levels", "floats"),
        "INTERPRETED": False,
    }

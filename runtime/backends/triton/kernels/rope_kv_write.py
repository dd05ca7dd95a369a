"""From a product of queries, keys and values to what attention reads: head norm, rotary embedding, Hadamard turn, and
keys and values quantized into their pages."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.attention import HeadPages
from runtime.backends.triton.fused_linear import PartialSums, SumsForm
from runtime.backends.triton.kernels.attention_tiles import FORMS, FP8, INT4, PLAIN
from runtime.backends.triton.kernels.common import largest, nearest, rounded, to_float16, to_fp8, wait_for_inputs
from runtime.backends.triton.kernels.norm_act import product_arguments, product_at, product_constants
from runtime.backends.triton.launcher import BoundKernel, Launcher


@triton.jit
def hadamard(x, HEAD_DIM: tl.constexpr, ROOT: tl.constexpr):
    """float32 `x [D]` times an orthonormal Hadamard matrix, in the order of `kv_quant.rotate_heads`; ROOT is the
    square root of D. D is 32 to 512."""
    d = tl.arange(0, HEAD_DIM)
    LEVELS: tl.constexpr = 5 + (HEAD_DIM >= 64) + (HEAD_DIM >= 128) + (HEAD_DIM >= 256) + (HEAD_DIM >= 512)
    for level in tl.static_range(LEVELS):
        other = tl.gather(x, d ^ (1 << level), 0)
        x = tl.where((d >> level & 1) == 1, other - x, x + other)
    return tl.div_rn(x, ROOT)


@triton.jit
def write_head(
    x, slot, head, codes_ptr, scales_ptr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FORM: tl.constexpr
):
    """Stores 16-bit `x [D]`, given in float32, as `kv_quant.quantize_heads` quantizes it."""
    d, place = tl.arange(0, HEAD_DIM), slot * KV_HEADS + head
    if FORM == PLAIN:
        tl.store(codes_ptr + place * HEAD_DIM + d, x.to(codes_ptr.dtype.element_ty))
    elif FORM == FP8:
        scale = to_float16(tl.div_rn(largest(x), 448.0))
        steps = tl.div_rn(x, tl.where(scale == 0.0, float("inf"), scale))
        steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -448.0), 448.0), 0.0)
        tl.store(codes_ptr + place * HEAD_DIM + d, to_fp8(steps).to(tl.uint8))
        tl.store(scales_ptr + place, scale.to(tl.float16))
    else:
        TOP: tl.constexpr = 15.0 if FORM == INT4 else 255.0
        has_nan = tl.max((x != x).to(tl.int32), 0) > 0
        low = tl.where(has_nan, float("nan"), tl.min(x, 0))
        scale = to_float16(tl.div_rn(tl.max(x, 0), TOP) - tl.div_rn(low, TOP))
        offset = to_float16(low)
        steps = tl.div_rn(x - offset, tl.where(scale == 0.0, float("inf"), scale))
        codes = nearest(tl.where(steps == steps, tl.minimum(tl.maximum(steps, 0.0), TOP), 0.0))
        if FORM == INT4:
            codes = codes | tl.gather(codes, d ^ HEAD_DIM // 2, 0) << 4
            tl.store(codes_ptr + place * (HEAD_DIM // 2) + d, codes.to(tl.uint8), mask=d < HEAD_DIM // 2)
        else:
            tl.store(codes_ptr + place * HEAD_DIM + d, codes.to(tl.uint8))
        tl.store(scales_ptr + place * 2, scale.to(tl.float16))
        tl.store(scales_ptr + place * 2 + 1, offset.to(tl.float16))


@Launcher
@triton.jit(do_not_specialize=["M", "splits"], do_not_specialize_on_alignment=["slots_ptr"])
def fused_qk_norm_rope_kv_write(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, norm_ptr, cos_ptr, sin_ptr, slots_ptr, query_ptr,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, eps, M, N, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROOT: tl.constexpr,
    HEAD_NORM: tl.constexpr, HADAMARD: tl.constexpr, KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, INTERPRETED: tl.constexpr,
    WAITS: tl.constexpr = False,
):  # fmt: skip
    """One head of one token per program (token, head): queries to `query [M, HEADS, D]`, keys and values to `slots [M]`
    of pages as `paged_attention` reads them; of a slot below 0 nothing is stored.

    Rounds to 16 bits where `TorchOps` and `rotate_heads` do, except that a GPU multiplies by cosines and adds in
    one instruction (`fma.rn.bf16x2`), which rounds once.
    """
    wait_for_inputs(WAITS)
    m, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HEAD_DIM)
    like = query_ptr.dtype.element_ty
    qkv = part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, M, N, splits
    x = product_at(qkv, m, head * HEAD_DIM + d, d >= 0, SPLITS, HAS_BIAS, SCALED, like, INTERPRETED)
    slot = tl.load(slots_ptr + m)
    if head < HEADS + KV_HEADS:
        if HEAD_NORM:
            weight = tl.load(norm_ptr + head * HEAD_DIM + d).to(tl.float32)
            x = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + eps), like, INTERPRETED)
            x = rounded(x * weight, like, INTERPRETED)
        cos = tl.load(cos_ptr + m * HEAD_DIM + d).to(tl.float32)
        sin = tl.load(sin_ptr + m * HEAD_DIM + d).to(tl.float32)
        half_turned = rounded(tl.gather(x, d ^ HEAD_DIM // 2, 0) * sin, like, INTERPRETED)
        x = rounded(half_turned + rounded(x * cos, like, INTERPRETED), like, INTERPRETED)
        if HADAMARD:
            x = rounded(hadamard(x, HEAD_DIM, ROOT), like, INTERPRETED)
        if head < HEADS:
            tl.store(query_ptr + (m * HEADS + head) * HEAD_DIM + d, x.to(like))
        elif slot >= 0:
            write_head(x, slot, head - HEADS, keys_ptr, key_scales_ptr, KV_HEADS, HEAD_DIM, KEY_FORM)
    elif slot >= 0:
        value_head = head - HEADS - KV_HEADS
        write_head(x, slot, value_head, values_ptr, value_scales_ptr, KV_HEADS, HEAD_DIM, VALUE_FORM)


def qk_norm_rope_kv_write(
    qkv: PartialSums, head_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, slots: Tensor, into: HeadPages
) -> Tensor:
    """Stores keys and values of M tokens and gives their queries `[M, heads, D]`, in the basis of the keys.

    Args:
        qkv: of all heads side by side, `[M, (heads + 2 * kv_heads) * D]`.
        head_norm: RMSNorm weights `[heads + kv_heads, D]`, or None.
        cos, sin: `[M, 1, D]`, sine with its sign, in the dtype of the queries.
        slots: int64 `[M]`; nothing is stored for one below 0.
    """
    (tokens, _, head_dim), kv_heads = cos.shape, into.pages[0].shape[2]
    heads, width = qkv.num_rows // head_dim - 2 * kv_heads, qkv.parts.shape[2]
    query = cos.new_empty(tokens, heads, head_dim)
    kernel = _bound(heads, kv_heads, head_dim, qkv.form, width, head_norm is not None, into.hadamard, into.formats)
    norm = () if head_norm is None else (head_norm,)
    (keys, values), (key_scales, value_scales) = into.pages, into.scales
    into_pages = keys, key_scales, values, value_scales
    grid = tokens, heads + 2 * kv_heads
    kernel(grid, *product_arguments(qkv), *norm, cos, sin, slots, query, *into_pages, eps, tokens)
    return query


@cache
def _bound(
    heads: int,
    kv_heads: int,
    head_dim: int,
    sums: SumsForm,
    width: int,
    has_norm: bool,
    is_hadamard: bool,
    formats: tuple[str, str],
) -> BoundKernel:
    norm = {} if has_norm else {"norm_ptr": None}
    key_form, value_form = (FORMS[name] for name in formats)
    return fused_qk_norm_rope_kv_write.bind(
        **norm, N=width, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROOT=head_dim**0.5, HEAD_NORM=has_norm,
        HADAMARD=is_hadamard, KEY_FORM=key_form, VALUE_FORM=value_form, **product_constants(sums), num_warps=1,
    )  # fmt: skip

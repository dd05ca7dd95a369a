"""Sums of the splits of attention, put into the form that the next product takes in the same launch."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.fused_linear import ROWS_LAYOUT, SUMS, ActivationLayout, QuantizedInput
from runtime.backends.triton.kernels.attention_tiles import LOG2_E
from runtime.backends.triton.kernels.common import rounded, wait_for_inputs
from runtime.backends.triton.kernels.norm_act import form_constants, input_pointers, store_row
from runtime.backends.triton.kernels.tile_list import TileList
from runtime.backends.triton.launcher import BoundKernel, Launcher
from runtime.backends.triton.sizes import cdiv

SPLIT_CLASSES = (8, 64)
"""Most splits that one build joins; the last are the most there are."""


@Launcher
@triton.jit(do_not_specialize=["M"])
def join_splits(
    part_ptr, weight_ptr, places_ptr, sink_ptr, out_ptr, beside_ptr, M, num_sums,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, FORM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr, WAITS: tl.constexpr = False,
):  # fmt: skip
    """Stores parts `[n, HEADS, D]` by their weights `[n, HEADS]` as an input `[M, HEADS * D]` in a form; zeros for a
    row that saw nothing.

    Programs (token, block of whole heads). A token has as many parts as `places [M, 2]` says, from one on: SPLITS at
    most, a power of two. One without parts is in `out` already. A head may have a logit at `sink_ptr` that counts in
    its sum of weights.
    """
    wait_for_inputs(WAITS)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = block * (BLOCK // HEAD_DIM) + tl.arange(0, BLOCK // HEAD_DIM)
    split, d = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    first, splits = tl.load(places_ptr + token * 2).to(tl.int64), tl.load(places_ptr + token * 2 + 1)
    place = (first + split)[None, :] * HEADS + head[:, None]
    inside = (head < HEADS)[:, None] & (split < splits)[None, :]
    weight = tl.load(weight_ptr + place, mask=inside, other=float("-inf"))
    used = weight > float("-inf")
    peak = tl.max(weight, 1)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=head < HEADS, other=float("-inf")).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    share = tl.exp2(weight - base[:, None])
    part_ptrs = part_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :]
    part = tl.load(part_ptrs, mask=used[:, :, None], other=0.0)
    total = tl.sum(share, 1)
    if sink_ptr is not None:
        total += tl.exp2(sink - base)
    joined = tl.sum(part * share[:, :, None], 1) / tl.where(total > 0, total, 1.0)[:, None]
    x = rounded(tl.reshape(joined, (BLOCK,)), out_ptr.dtype.element_ty, INTERPRETED)
    k = block * BLOCK + tl.arange(0, BLOCK)
    is_whole = (k < HEADS * HEAD_DIM) & (k * 0 + splits == 0)
    x += tl.load(out_ptr + token * (HEADS * HEAD_DIM) + k, mask=is_whole, other=0.0).to(tl.float32)
    store_row(x, token, block * BLOCK, M, HEADS * HEAD_DIM, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)


def join(
    parts: Tensor,
    weights: Tensor,
    tiles: TileList,
    sinks: Tensor | None,
    out: QuantizedInput,
    form: ActivationLayout = ROWS_LAYOUT,
) -> None:
    """Stores the joined parts `[n, heads, D]` of tokens in `out [M, heads * D]`, which has the others, in rows or in
    rows with sums.

    Args:
        weights: `[n, heads]`, see `store_rows`.
        tiles: says which token has which parts.
        sinks: logits `[heads]`, or None.
    """
    _, heads, head_dim = parts.shape
    most = next(most for most in SPLIT_CLASSES if tiles.most_splits <= most)
    kernel, blocks = _join(heads, head_dim, most, sinks is not None, form)
    sink, tokens = () if sinks is None else (sinks,), out.rows.shape[0]
    kernel((tokens, blocks), parts, weights, tiles.parts, *sink, *input_pointers(out), tokens)


@cache
def _join(heads: int, head_dim: int, splits: int, has_sinks: bool, form: ActivationLayout) -> tuple[BoundKernel, int]:
    """The kernel, and programs of a token."""
    block = max(head_dim, form.unit) if form.kind == SUMS else head_dim
    sinks = {} if has_sinks else {"sink_ptr": None}
    kernel = join_splits.bind(
        **sinks, HEADS=heads, HEAD_DIM=head_dim, SPLITS=splits, **form_constants(form, block),
        INTERPRETED=triton.knobs.runtime.interpret, num_warps=8 if head_dim > 256 else 4,
    )  # fmt: skip
    return kernel, cdiv(max(heads * head_dim, form.unit * form.num_sums), block)

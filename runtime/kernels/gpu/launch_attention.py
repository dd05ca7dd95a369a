"""Grids and arguments of attention over pages: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from runtime.kernels.gpu.attention import join_splits, paged_attention
from runtime.kernels.gpu.front import NO_FRONT, Front

FORMS = {"16bit": 0, "fp8": 1, "int8": 2, "int4": 3}
"""Of keys and of values, as the kernel knows them."""


def attention_constants(
    head_dim: int,
    formats: tuple[str, str],
    block_rows: int,
    *,
    windowed: bool = False,
    streaming: bool = False,
    exact: bool = False,
    tree: bool = False,
) -> dict[str, Any]:
    """How `paged_attention` is compiled for heads and pages of a kind, `block_rows` rows of a program, and what else
    there is to look at."""
    # What fits in registers as `scripts/compile_kernels.py` found it: wide heads, and many rows that look at more than
    # pages, need more than four warps have.
    beside = streaming and (exact or tree)
    crowded = block_rows == 64 and exact
    heavy = head_dim > 128 or crowded or (beside and block_rows > 16 and head_dim > 32)
    few_keys = block_rows == 64 or beside or (exact and head_dim in (64, 128))
    return {
        "HEAD_DIM": head_dim,
        "KEY_FORM": FORMS[formats[0]],
        "VALUE_FORM": FORMS[formats[1]],
        "WINDOWED": windowed,
        "STREAMING": streaming,
        "EXACT": exact,
        "TREE": tree,
        "BLOCK_R": block_rows,
        "BLOCK_T": 32 if few_keys else 64,
        "STAGES": 1 if crowded or (beside and head_dim > 128) else 2,
        "INTERPRETED": triton.knobs.runtime.interpret,
        "num_warps": 8 if heavy else 4,
    }


def join_constants(head_dim: int, splits: int) -> dict[str, Any]:
    """How `join_splits` is compiled."""
    return {"HEAD_DIM": head_dim, "SPLITS": triton.next_power_of_2(splits), "num_warps": 4}


def attend(
    query: Tensor,
    pages: Sequence[Tensor],
    scales: Sequence[Tensor],
    formats: tuple[str, str],
    blocks: Tensor,
    positions: Tensor,
    window: int | None,
    block_rows: int,
    splits: int,
    front: Front = NO_FRONT,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Attention `[B * n, heads, D]` of n tokens of each of B sequences, in the dtype of the query.

    Args:
        query: `[B * n, heads, D]`, contiguous, in the basis of the keys.
        pages, scales: of keys and of values, `[blocks, block_size, kv_heads, ...]`.
        formats: of keys and of values, a name of `FORMS` each.
        blocks: int64 `[B, blocks each]`.
        positions: int64 `[B * n]`, of each token among the keys of its blocks; -1 is padding, whose result is zeros.
        block_rows: rows of one program, 16 to 64.
        splits: into which the context is cut.
        front: what is special about the first tokens.
        ancestors: int64 `[B * n]`, of tokens that are trees of guesses (`AttentionGroup`); None is none.
    """
    tokens, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = pages[0].shape
    tokens_each = tokens // len(blocks)
    rows_each = tokens_each * (heads // kv_heads)
    parts = query.new_empty(tokens, heads, splits, head_dim, dtype=torch.float32)
    weights = query.new_empty(tokens, heads, splits, dtype=torch.float32)
    exact = front.exact or (query, query)
    constants = attention_constants(
        head_dim, formats, block_rows,
        windowed=window is not None, streaming=front.sinks > 0, exact=front.exact is not None,
        tree=ancestors is not None,
    )  # fmt: skip
    grid = (len(blocks) * triton.cdiv(rows_each, block_rows), kv_heads, splits)
    paged_attention[grid](
        query, query if front.moved is None else front.moved, pages[0], scales[0], pages[1], scales[1], *exact,
        blocks if front.slots is None else front.slots, blocks, positions,
        positions if ancestors is None else ancestors, parts, weights,
        head_dim**-0.5, heads * head_dim, blocks.shape[1], block_size, tokens_each, rows_each, splits, window or 0,
        front.sinks, exact[0].shape[1] if front.exact else 0,
        HEADS=heads, KV_HEADS=kv_heads, **constants,
    )  # fmt: skip
    out = torch.empty_like(query)
    join_splits[(tokens * heads,)](parts, weights, out, splits, **join_constants(head_dim, splits))
    return out

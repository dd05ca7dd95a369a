"""Memory that the largest step takes beside weights, keys and values: estimates from sizes alone. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.core.config import RuntimeConfig
from runtime.speculative.ngram import MAX_TREE_TOKENS, TREES

if TYPE_CHECKING:
    from runtime.core.model_config import DecoderConfig


FLOAT32 = 4
LOGITS_COPIES = 4
"""Of the float32 logits of a step, while tokens are drawn: themselves, tempered, sorted, noisy."""
GPU_LOGIT_BYTES = 64
"""Of one logit on a GPU, where its noise is computed for the whole vocabulary, and at the worst all of it sorted."""
RECORDED_LOGIT_BYTES = 24
"""Of one logit of a recorded step: itself, tempered, without what is cut off, and its exponential, twice on the way."""
SPLIT_TOKENS, MOST_SPLITS = 64, 8
"""Linears over so few tokens add up so many float32 parts of their output at most."""
LIBRARY_BYTES = 256 * 2**20
"""Of a GPU: kernels once they are loaded, working memory of matrix products, a panel of weights that is expanded."""


def step_bytes(model: DecoderConfig, config: RuntimeConfig, itemsize: int, seen_keys: int = 0) -> int:
    """What the largest step holds.

    The widest of three moments, on top of the hidden states and their norm: queries, keys and values with their rotated
    copy; the feed-forward layer; logits of every sequence. Attention's scores are not kept, its mask is.

    Args:
        itemsize: bytes of one activation.
        seen_keys: that a span of a prompt looks at through a mask.
    """
    logits = config.max_num_seqs * model.vocab_size * max(itemsize, FLOAT32) * LOGITS_COPIES
    mask = config.max_span_tokens * seen_keys * itemsize
    return _rows_bytes(model, config.max_num_batched_tokens, itemsize, mask, logits)


def gpu_step_bytes(model: DecoderConfig, config: RuntimeConfig, itemsize: int) -> int:
    """What the largest step holds on a GPU, with what recorded steps keep for themselves; on the large side."""
    rows, drawn = config.max_num_seqs, _drawn_rows(config)
    heads = model.num_heads * model.head_dim
    widest = max(2 * model.intermediate_size, heads + 2 * model.num_kv_heads * model.head_dim, model.vocab_size)
    parts = SPLIT_TOKENS * MOST_SPLITS * widest * FLOAT32
    attended = config.max_num_batched_tokens * heads * FLOAT32
    step = _rows_bytes(model, config.max_num_batched_tokens, itemsize, attended, drawn * model.vocab_size * itemsize)
    recorded = _rows_bytes(model, rows, itemsize, 0, rows * model.vocab_size * RECORDED_LOGIT_BYTES)
    return step + recorded + 2 * parts + drawn * model.vocab_size * GPU_LOGIT_BYTES + LIBRARY_BYTES


def _drawn_rows(config: RuntimeConfig) -> int:
    """Rows of logits that one step draws from: of each sequence one, and one for each guess, all of them tokens of the
    step."""
    guesses = (
        MAX_TREE_TOKENS
        if config.speculative_model == TREES
        else config.num_speculative_tokens
        if config.speculative_model
        else 0
    )
    return min(config.max_num_seqs * (1 + guesses), config.max_num_batched_tokens)


def _rows_bytes(model: DecoderConfig, rows: int, itemsize: int, attention: int, logits: int) -> int:
    """Of a step over so many rows, with what attention holds beside its heads, and with logits."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    moments = rows * 2 * heads * itemsize + attention, rows * 3 * model.intermediate_size * itemsize, logits
    return rows * 2 * model.hidden_size * itemsize + max(moments)

"""Logits of whole windows of text from the model that is served, without pages. Evaluation measures with this."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from runtime.attention.cached import CachedAttention
from runtime.attention.dense import DenseAttention
from runtime.model.decoder import Attention, Decoder

TOKENS_AT_ONCE = 4096
"""Tokens in one forward pass at most (one sequence at least): bounds activations, not results."""


@torch.inference_mode()
def hidden_states(decoder: Decoder, tokens: Tensor, kv_cache: KVCacheScheme = UNCOMPRESSED) -> Tensor:
    """Hidden states `[B, T, H]` before the final norm, of int64 tokens `[B, T]`; rows start at position 0.

    Args:
        kv_cache: keys and values are read as such a cache gives them back: what a server that keeps them so computes.
    """
    batch, length = tokens.shape
    attention = _attention(decoder, length, kv_cache)
    rows = max(1, TOKENS_AT_ONCE // length)
    chunks = []
    for part in tokens.to(decoder.device).split(rows):
        positions = torch.arange(length, device=decoder.device).repeat(len(part))
        chunks.append(decoder.forward(part.flatten(), positions, attention))
    return torch.cat(chunks).view(batch, length, -1)


@torch.inference_mode()
def score(decoder: Decoder, tokens: Tensor, kv_cache: KVCacheScheme = UNCOMPRESSED) -> Tensor:
    """Causal next-token logits `[B, T, V]` in float32 (float64 for a float64 model) of int64 tokens `[B, T]`.

    The result itself is the memory: B * T * V * 4 bytes. Call it with few rows, or take `hidden_states` and
    `decoder.logits` of a slice at a time.
    """
    return decoder.logits(hidden_states(decoder, tokens, kv_cache).flatten(0, 1)).view(*tokens.shape, -1)


def _attention(decoder: Decoder, length: int, kv_cache: KVCacheScheme) -> Attention:
    sizes = (length, decoder.config.windows, decoder.dtype, decoder.device)
    return DenseAttention(*sizes) if kv_cache.is_exact else CachedAttention(*sizes, kv_cache)

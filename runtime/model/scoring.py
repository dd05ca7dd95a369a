"""Logits of whole windows of text from the served model, without pages. Evaluation uses it."""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.kv_quant import read_back, rotate_heads
from compress.checkpoint.state_dtype import STATE_FLOAT32
from runtime.backends.model import Model
from runtime.backends.scores import DenseAttention, Scores
from runtime.backends.span_attention import attend_span, visibility_mask
from runtime.backends.state_memory import StepStates
from runtime.model.mtp import MtpHead


class CachedAttention(DenseAttention):
    """As `DenseAttention`, but every token reads keys and values, its own included, as dequantized from a cache.

    The first `scheme.sinks` tokens, and the last `scheme.residual_length` ones before a token, are read as they are.
    """

    def __init__(
        self,
        length: int,
        windows: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
        scores: Scores,
        scheme: KVCacheScheme,
    ) -> None:
        self.scheme = scheme
        super().__init__(length, windows, dtype, device, scores)

    def mask(self, positions: Tensor, window: int | None, chunk: int | None) -> Tensor | None:
        """Builds the additive mask `[T, T]`; None where the causal one suffices.

        With recent tokens it is `[T, 2 T]`: first the dequantized keys, seen from afar, then the exact ones.
        """
        recent = self.scheme.residual_length
        if not recent and chunk is None and (window is None or window >= self.length):
            return None
        seen = visibility_mask(positions, self.length, window, self.dtype, chunk=chunk)
        if not recent:
            return seen
        near = (positions.unsqueeze(-1) - positions) < recent
        hidden = float("-inf")
        return torch.cat((seen.masked_fill(near, hidden), seen.masked_fill(~near, hidden)), -1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.scheme.rotate:
            latent, key = self.scores.latent(layer), rotate_heads(key)
            query = rotate_heads(query) if latent is None else latent.rotated(query, rotate_heads)
        spans = zip(query.split(self.length), key.split(self.length), value.split(self.length), strict=True)
        masks = self.chosen.of(layer) or repeat(self.masks[layer])
        return torch.cat([self._attend(layer, *span, mask) for span, mask in zip(spans, masks, strict=False)])

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        kept_key, kept_value = read_back(key, self.scheme.key_format), read_back(value, self.scheme.value_format)
        kept_key[: self.scheme.sinks] = key[: self.scheme.sinks]
        kept_value[: self.scheme.sinks] = value[: self.scheme.sinks]
        if self.scheme.residual_length:
            kept_key, kept_value = torch.cat((kept_key, key)), torch.cat((kept_value, value))
        if (latent := self.scores.latent(layer)) is not None:
            return latent.attend_span(query, kept_key, kept_value, mask)
        return attend_span(query, kept_key, kept_value, mask, self.scores.softcap, self.scores.sinks(layer))


TOKENS_AT_ONCE = 4096
"""Tokens in one forward pass at most (one sequence at least): bounds activations, not results."""


@torch.inference_mode()
def hidden_states(
    decoder: Model, tokens: Tensor, kv_cache: KVCacheScheme = UNCOMPRESSED, state_dtype: str = STATE_FLOAT32
) -> Tensor:
    """Computes hidden states `[B, T, H]` before the final norm, of int64 tokens `[B, T]`; rows start at position 0.

    Args:
        kv_cache: form in which keys and values are stored and read back, as in serving.
        state_dtype: in which recurrent states are kept; in 16 bits they are rounded after every token, as in decoding.
    """
    batch, length = tokens.shape
    decoder = decoder if length <= decoder.config.default_length else decoder.for_length(length)
    attention = whole_attention(decoder, length, kv_cache)
    chunks = []
    for part in split_rows(tokens.to(decoder.device)):
        positions, states = whole_rows(decoder, part, state_dtype)
        chunks.append(decoder.forward(part.flatten(), positions, attention, None, states))
    return torch.cat(chunks).view(batch, length, -1)


def split_rows(tokens: Tensor) -> tuple[Tensor, ...]:
    """Splits `[B, T]` into parts that are computed in one forward pass each."""
    return torch.split(tokens, max(1, TOKENS_AT_ONCE // tokens.shape[1]))


def whole_rows(decoder: Model, tokens: Tensor, state_dtype: str) -> tuple[Tensor, StepStates | None]:
    """Returns positions `[B * T]` and recurrent states of whole sequences `[B, T]`."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=decoder.device).repeat(batch)
    return positions, decoder.whole_states([length] * batch, state_dtype)


@torch.inference_mode()
def score(
    decoder: Model, tokens: Tensor, kv_cache: KVCacheScheme = UNCOMPRESSED, state_dtype: str = STATE_FLOAT32
) -> Tensor:
    """Computes causal next-token logits `[B, T, V]` in float32 (float64 for a float64 model) of int64 tokens `[B, T]`.

    The result takes B * T * V * 4 bytes: call it with few rows, or use `hidden_states` and `decoder.logits` of a
    slice at a time.
    """
    return decoder.logits(hidden_states(decoder, tokens, kv_cache, state_dtype).flatten(0, 1)).view(*tokens.shape, -1)


@torch.inference_mode()
def head_states(head: MtpHead, following: Tensor, hidden: Tensor) -> Tensor:
    """Computes states `[T, H]` of a head of multi-token prediction over one text from its begin.

    Args:
        following: int64 `[T]`, the tokens after the positions.
        hidden: final hidden states `[T, H]` of the model there.
    """
    length, decoder = len(following), head.decoder
    positions = torch.arange(length, device=decoder.device)
    return head.forward(following, positions, hidden, whole_attention(decoder, length))


def whole_attention(decoder: Model, length: int, kv_cache: KVCacheScheme = UNCOMPRESSED) -> DenseAttention:
    """Returns the attention of sequences of `length` tokens that are computed at once."""
    options = (length, decoder.config.windows, decoder.dtype, decoder.device, decoder.scores)
    return DenseAttention(*options) if kv_cache.is_exact else CachedAttention(*options, kv_cache)

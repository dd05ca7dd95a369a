"""Bytes of keys and values: of one token, and of those that are kept exactly beside the blocks. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme

if TYPE_CHECKING:
    from runtime.model.config import DecoderConfig

SPARE_RECENT_TOKENS = 17
"""A sequence's exact recent tokens have room for so many more: one that is known and the longest draft. What a rejected
draft overwrote is out of sight then."""


@dataclass(frozen=True, slots=True)
class ExactTokens:
    """Tokens whose keys and values are kept as they were computed, beside the blocks.

    Attributes:
        per_sequence: so many of a sequence have room.
        num_sequences: that have such tokens at the same time, at most.
        token_bytes: keys and values of one of them in all layers.
    """

    per_sequence: int = 0
    num_sequences: int = 0
    token_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.per_sequence * self.num_sequences * self.token_bytes

    def __str__(self) -> str:
        return f"{self.per_sequence} tokens of {self.num_sequences} sequences"


NO_EXACT_TOKENS = ExactTokens()


def exact_tokens(model: DecoderConfig, scheme: KVCacheScheme, itemsize: int, num_sequences: int) -> ExactTokens:
    """What a form of keys and values keeps exactly of so many sequences; `itemsize` as in `kv_token_bytes`."""
    recent = scheme.recent + SPARE_RECENT_TOKENS if scheme.recent else 0
    return ExactTokens(scheme.sinks + recent, num_sequences, kv_token_bytes(model, itemsize=itemsize))


def kv_token_bytes(model: DecoderConfig, scheme: KVCacheScheme = UNCOMPRESSED, itemsize: int = 2) -> int:
    """Keys and values of one token in all layers, scales and offsets included, exact copies not.

    Args:
        itemsize: bytes of one element where nothing is quantized.
    """
    return model.num_layers * model.num_kv_heads * scheme.head_bytes(model.head_dim, itemsize)

"""Multi-head latent attention (arXiv:2405.04434, section 2.1): one latent for the keys and values of all heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from compress.common.errors import CheckpointError
from compress.models.config import Config, flag, norm, number, positive
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.indexer import Indexer
from compress.models.norm import Norm
from compress.models.rope import Rope

NORM_EPS = 1e-6
"""Eps of the norms of latents, whatever that of the other norms is."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Projections that make queries, keys and values from latents.

    A key head is `[K, R]`: channels of its own, then rotated channels that all heads share. A query head is so too.

    Attributes:
        rank: channels of the latent, from which `expansion` makes K key channels and then `value_dim` value channels
            of every head.
        rotated: channels R of the shared rotated key.
        expansion: reads the normalized latent.
        query_norm, query: norm of the latent of queries, and the linear that makes queries from it; None where
            queries are projected at once.
        indexer: chooses the tokens that a token sees; None where it sees all.
        index_layer: earlier layer whose choice is seen here, in a layer without an indexer.
    """

    rank: int
    rotated: int
    value_dim: int
    norm: Norm
    expansion: Linear
    query_norm: Norm | None = None
    query: Linear | None = None
    indexer: Indexer | None = None
    index_layer: int | None = None

    @property
    def width(self) -> int:
        """Numbers that are kept of a token: its latent and its rotated key."""
        return self.rank + self.rotated

    @property
    def linears(self) -> tuple[Linear, ...]:
        indexer = () if self.indexer is None else (self.indexer.query, self.indexer.key)
        return *(() if self.query is None else (self.query,)), self.expansion, *indexer

    @property
    def norms(self) -> tuple[Norm, ...]:
        indexer = () if self.indexer is None else (self.indexer.norm,)
        return *(() if self.query_norm is None else (self.query_norm,)), self.norm, *indexer

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""
        return () if self.indexer is None else (self.indexer.weights,)


def latent_attention(
    config: Config, rope: Rope | None, *, indexer: Indexer | None = None, index_layer: int | None = None, **options: Any
) -> Attention:
    """Composes latent attention named as in DeepSeek-V2. Raises CheckpointError: fewer key-value heads than query
    heads."""
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if (kv_heads := positive(config, "num_key_value_heads", heads)) != heads:
        raise CheckpointError(f"latent attention has {kv_heads} key-value heads for {heads} heads", "Set both alike")
    rotated, value_dim = positive(config, "qk_rope_head_dim"), positive(config, "v_head_dim")
    head_dim, bias = rotated + positive(config, "qk_nope_head_dim"), flag(config, "attention_bias")
    latent = _latent(config, heads, head_dim - rotated)
    first = Linear("self_attn.q_proj", heads * head_dim, hidden)
    if latent.query_norm is not None:
        first = Linear("self_attn.q_a_proj", latent.query_norm.size, hidden, bias)
    return Attention(
        heads,
        1,
        head_dim,
        (first, Linear("self_attn.kv_a_proj_with_mqa", latent.width, hidden, bias)),
        Linear("self_attn.o_proj", hidden, heads * value_dim, bias, split="rows"),
        rope,
        scale=_scale(rope, head_dim),
        latent=replace(latent, indexer=indexer, index_layer=index_layer),
        **options,
    )


def _latent(config: Config, heads: int, own_channels: int) -> Latent:
    rank, rotated, value_dim = (positive(config, key) for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    key_norm = norm({"rms_norm_eps": NORM_EPS}, "self_attn.kv_a_layernorm", rank)
    expansion = Linear("self_attn.kv_b_proj", heads * (own_channels + value_dim), rank)
    if config.get("q_lora_rank") is None:
        return Latent(rank, rotated, value_dim, key_norm, expansion)
    query_rank = positive(config, "q_lora_rank")
    query_norm = norm({"rms_norm_eps": NORM_EPS}, "self_attn.q_a_layernorm", query_rank)
    query = Linear("self_attn.q_b_proj", heads * (own_channels + rotated), query_rank)
    return Latent(rank, rotated, value_dim, key_norm, expansion, query_norm, query)


def _scale(rope: Rope | None, head_dim: int) -> float | None:
    """Computes the factor on scores with the temperature of YaRN (arXiv:2309.00071, section 3.4)."""
    if rope is None or rope.type == "default" or not (weight := number(rope.options, "mscale_all_dim", 0.0)):
        return None
    factor = number(rope.options, "factor", 1.0)
    return math.pow(head_dim, -0.5) * (0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0) ** 2

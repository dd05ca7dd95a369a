"""Queries, latents and rotated keys of latent attention (arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.input_rounding import InputRounding
from compress.models.mixers.attention import Attention
from compress.models.mixers.latent import Latent
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.latent import LatentHeads, LatentProducts, LatentShape
from runtime.backends.registry import choose_latent_heads
from runtime.model.mixers.indexer import IndexerWeights, load_indexer
from runtime.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention between its projections.

    Attributes:
        rotated: channels R of rotated keys.
        norm: of latents.
        query_norm, query: norm of the latents of queries, and the linear that reads them; None where queries are
            projected at once.
        indexer: None where a token sees all tokens, or those that an earlier layer chose.
        rounding: of latents, which the expansion reads; None keeps them.
    """

    heads: LatentProducts
    rotated: int
    norm: NormWeights
    query_norm: NormWeights | None = None
    query: Linear | None = None
    indexer: IndexerWeights | None = None
    rounding: InputRounding | None = None

    @property
    def nbytes(self) -> int:
        return self.heads.nbytes + sum(part.nbytes for part in (self.query, self.indexer) if part is not None)

    def read(self, projected: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Splits what the first projections give, `[T, *]`: queries `[T, *]`, latents `[T, rank]` and keys `[T, R]`,
        not rotated, and what the queries were made from."""
        rank = len(self.norm.weight)
        query, row, key = projected.split((projected.shape[-1] - rank - self.rotated, rank, self.rotated), -1)
        source = query
        if self.query_norm is not None and self.query is not None:
            source = _normalize(query, self.query_norm, ops)
            query = self.query(source)
        latents = _normalize(row, self.norm, ops)
        return query, latents if self.rounding is None else self.rounding(latents), key, source

    def beside(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Splits queries `[T, heads, K + R]`: own channels, and the others beside the key, `[T, heads + 1, R]`."""
        own = self.heads.shape.own
        return query[..., :own], torch.cat((query[..., own:], key.unsqueeze(1)), 1)


def _normalize(x: Tensor, norm: NormWeights, ops: Ops) -> Tensor:
    return ops.add_rms_norm(x.contiguous(), None, norm.weight, norm.eps)


def load_latent(mixer: Attention, latent: Latent, block: WeightReader) -> LatentWeights:
    """Loads what is between the projections."""
    return LatentWeights(
        load_heads(mixer, latent, block),
        latent.rotated,
        block.norm(latent.norm),
        block.optional_norm(latent.query_norm),
        None if latent.query is None else block.linear(latent.query),
        None if latent.indexer is None else load_indexer(latent.indexer, mixer, latent.rotated, block),
        block.rounding(f"{block.prefix}{latent.expansion.name}"),
    )


def load_heads(mixer: Attention, latent: Latent, block: WeightReader) -> LatentProducts:
    """Loads the expansion: packed where a kernel multiplies it from both sides, else dequantized to be split."""
    weight, name = block.weight(latent.expansion.name), latent.expansion.name.rpartition(".")[2]
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    if isinstance(weight, Tensor):
        block.used[f"{name}: dense, split by heads at load"] += 1
        return split_expansion(weight.to(block.target.device, block.target.dtype), latent, mixer.num_heads, scale)
    choice = choose_latent_heads(weight.scheme, latent.rank, block.target, block.kernels)
    block.use(f"{name}: {weight.scheme}, split by heads", choice)
    if choice.kernel is not None:
        own = latent.expansion.out_features // mixer.num_heads - latent.value_dim
        return choice.kernel.prepare(weight, LatentShape(mixer.num_heads, own, latent.value_dim, latent.rank), scale)
    dense = weight.dequantize(block.target.dtype).to(block.target.device, block.target.dtype)
    return split_expansion(dense, latent, mixer.num_heads, scale)


def split_expansion(weight: Tensor, latent: Latent, num_heads: int, scale: float) -> LatentHeads:
    """Splits the weight `[heads * (K + V), rank]` that makes keys and values of latents."""
    heads = weight.view(num_heads, -1, latent.rank)
    key, value = heads.split((heads.shape[1] - latent.value_dim, latent.value_dim), 1)
    return LatentHeads(key.contiguous(), value.contiguous(), scale)

"""Queries, latents and rotated keys of latent attention (arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.latent import Latent
from compress.models.spec import Attention
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.latent import LatentHeads
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
    """

    heads: LatentHeads
    rotated: int
    norm: NormWeights
    query_norm: NormWeights | None = None
    query: Linear | None = None
    indexer: IndexerWeights | None = None

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
        return query, _normalize(row, self.norm, ops), key, source

    def beside(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Splits queries `[T, heads, K + R]`: own channels, and the others beside the key, `[T, heads + 1, R]`."""
        own = self.heads.key.shape[1]
        return query[..., :own], torch.cat((query[..., own:], key.unsqueeze(1)), 1)


def _normalize(x: Tensor, norm: NormWeights, ops: Ops) -> Tensor:
    return ops.add_rms_norm(x.contiguous(), None, norm.weight, norm.eps)


def load_latent(mixer: Attention, latent: Latent, block: WeightReader) -> LatentWeights:
    """Loads what is between the projections; the expansion is dequantized here to be split."""
    weight = block.weight(latent.expansion.name)
    form = "dense" if isinstance(weight, Tensor) else f"{weight.scheme}, dequantized"
    block.used[f"{latent.expansion.name.rpartition('.')[2]}: {form}, split by heads at load"] += 1
    dense = weight if isinstance(weight, Tensor) else weight.dequantize(block.target.dtype)
    dense = dense.to(block.target.device, block.target.dtype)
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    return LatentWeights(
        split_expansion(dense, latent, mixer.num_heads, scale),
        latent.rotated,
        block.norm(latent.norm),
        block.optional_norm(latent.query_norm),
        None if latent.query is None else block.linear(latent.query),
        None if latent.indexer is None else load_indexer(latent.indexer, mixer, latent.rotated, block),
    )


def split_expansion(weight: Tensor, latent: Latent, num_heads: int, scale: float) -> LatentHeads:
    """Splits the weight `[heads * (K + V), rank]` that makes keys and values of latents."""
    heads = weight.view(num_heads, -1, latent.rank)
    key, value = heads.split((heads.shape[1] - latent.value_dim, latent.value_dim), 1)
    return LatentHeads(key.contiguous(), value.contiguous(), scale)

"""Queries, latents and rotated keys of latent attention (arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.latent import Latent
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.latent import LatentHeads


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention between its projections.

    Attributes:
        rotated: channels R of rotated keys.
        norm: of latents.
        query_norm, query: norm of the latents of queries, and the linear that reads them; None where queries are
            projected at once.
    """

    heads: LatentHeads
    rotated: int
    norm: NormWeights
    query_norm: NormWeights | None = None
    query: Linear | None = None

    @property
    def nbytes(self) -> int:
        return self.heads.nbytes + (0 if self.query is None else self.query.nbytes)

    def read(self, projected: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        """Splits what the first projections give, `[T, *]`: queries `[T, *]`, latents `[T, rank]` and keys `[T, R]`,
        not rotated."""
        rank = len(self.norm.weight)
        query, row, key = projected.split((projected.shape[-1] - rank - self.rotated, rank, self.rotated), -1)
        if self.query_norm is not None and self.query is not None:
            query = self.query(_normalize(query, self.query_norm, ops))
        return query, _normalize(row, self.norm, ops), key

    def beside(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Splits queries `[T, heads, K + R]`: own channels, and the others beside the key, `[T, heads + 1, R]`."""
        own = self.heads.key.shape[1]
        return query[..., :own], torch.cat((query[..., own:], key.unsqueeze(1)), 1)


def _normalize(x: Tensor, norm: NormWeights, ops: Ops) -> Tensor:
    return ops.add_rms_norm(x.contiguous(), None, norm.weight, norm.eps)


def split_expansion(weight: Tensor, latent: Latent, num_heads: int, scale: float) -> LatentHeads:
    """Splits the weight `[heads * (K + V), rank]` that makes keys and values of latents."""
    heads = weight.view(num_heads, -1, latent.rank)
    key, value = heads.split((heads.shape[1] - latent.value_dim, latent.value_dim), 1)
    return LatentHeads(key.contiguous(), value.contiguous(), scale)

"""Latent attention (arXiv:2405.04434, section 2.1): queries, latents and rotated keys, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.input_rounding import InputRounding
from compress.models.mixers.attention import Attention
from compress.models.mixers.latent import Latent
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.latent import LatentHeads, LatentProducts, LatentShape
from runtime.backends.model import AttentionWeights, LayerStep
from runtime.backends.registry import choose_latent_heads
from runtime.model.mixers.indexer import IndexerWeights, load_indexer
from runtime.model.rotary import HeadRotation
from runtime.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """Weights of latent attention, and what computes it.

    Attributes:
        heads: what makes keys and values of latents.
        rotation: of the channels R of the key that all heads share.
        norm: of latents.
        query_norm, query: norm of the latents of queries, and the linear that reads them; None where queries are
            projected at once.
        indexer: None where a token sees all tokens, or those that an earlier layer chose.
        rounding: of latents, which the expansion reads; None keeps them.
    """

    spec: Attention
    qkv: Linear
    output: Linear
    heads: LatentProducts
    rotation: HeadRotation | None
    rotated: int
    norm: NormWeights
    query_norm: NormWeights | None = None
    query: Linear | None = None
    indexer: IndexerWeights | None = None
    rounding: InputRounding | None = None

    @property
    def attention(self) -> AttentionWeights:
        return AttentionWeights(self.qkv, self.output, latent_heads=self.heads)

    @property
    def nbytes(self) -> int:
        parts = self.qkv, self.output, self.heads, self.query, self.indexer
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor, index: int, step: LayerStep) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`; rotated keys and latents go to the attention of the step."""
        query, latent, key, source = self._read(self.qkv(x), step.ops)
        if self.indexer is not None:
            step.choose(index, self.indexer.read(x, source, step))
        query, own = query.view(len(query), self.spec.num_heads, -1), self.heads.shape.own
        others = torch.cat((query[..., own:], key.unsqueeze(1)), 1)
        others = others if self.rotation is None else self.rotation(others, step)
        query = grown(torch.cat((query[..., :own], others[:, :-1]), -1), self.spec, step.positions)
        attended = step.attention(index, query, others[:, -1:], latent.unsqueeze(1))
        return self.output(attended.flatten(1))

    def _read(self, projected: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _normalize(x: Tensor, norm: NormWeights, ops: Ops) -> Tensor:
    return ops.add_rms_norm(x.contiguous(), None, norm.weight, norm.eps)


def grown(query: Tensor, spec: Attention, positions: Tensor) -> Tensor:
    """Scales queries that grow with their position."""
    if spec.position_scale is not None:
        spans = (positions + spec.position_scale.first) // spec.position_scale.length
        growth = 1 + spec.position_scale.beta * torch.log1p(spans.to(torch.float32))
        query = query * growth.to(query.dtype).view(-1, 1, 1)
    return query


def load_latent(spec: Attention, latent: Latent, block: WeightReader) -> LatentLayer:
    """Loads latent attention."""
    return LatentLayer(
        spec,
        block.linear(*spec.qkv),
        block.linear(spec.output),
        load_heads(spec, latent, block),
        block.rotation(spec.rotation),
        latent.rotated,
        block.norm(latent.norm),
        block.optional_norm(latent.query_norm),
        None if latent.query is None else block.linear(latent.query),
        None if latent.indexer is None else load_indexer(latent.indexer, spec, latent.rotated, block),
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

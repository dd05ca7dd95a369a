"""Grouped-query attention in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.mixers.attention import Attention
from runtime.backends.base import Linear, NormWeights, Ops, add_and_normalize
from runtime.backends.fused_layers import fuses_head_norms
from runtime.backends.model import AttentionWeights, LayerStep, Mixer
from runtime.model.mixers.latent import grown, load_latent
from runtime.model.mixers.registry import loads
from runtime.model.rotary import HeadRotation, channel_order
from runtime.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Weights of attention, and what computes it.

    Attributes:
        rotation: of query and key heads; None for no positions.
        qk_norm: norms of queries and keys that `Ops.rotate` does not compute, each over as many channels as its weight
            has.
        value_norm: norm of value heads.
        head_gate: a number for each head, whose sigmoid multiplies what the head gives.
    """

    spec: Attention
    attention: AttentionWeights
    rotation: HeadRotation | None
    qk_norm: tuple[NormWeights, ...] = ()
    value_norm: NormWeights | None = None
    head_gate: Linear | None = None

    @property
    def nbytes(self) -> int:
        gate = 0 if self.head_gate is None else self.head_gate.nbytes
        return self.attention.qkv.nbytes + self.attention.output.nbytes + gate

    def __call__(self, x: Tensor, index: int, step: LayerStep) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`; keys and values go to the attention of the step."""
        attended = self._attend(self.attention.qkv(x).view(len(x), -1, self.spec.head_dim), index, step)
        if self.head_gate is not None:
            attended = attended * self.head_gate(x).sigmoid().unsqueeze(-1)
        return self.attention.output(attended.flatten(1))

    def _attend(self, heads: Tensor, index: int, step: LayerStep) -> Tensor:
        """Computes the output `[T, heads, D]` of attention from its projections `[T, all heads, D]`."""
        spec, gate = self.spec, None
        rotated = spec.num_heads + spec.own_kv_heads
        if spec.output_gate:
            queries, others = heads.tensor_split([2 * spec.num_heads], 1)
            query, gate = queries.unflatten(1, (-1, 2)).unbind(2)
            heads = torch.cat((query, others), 1)
        # Before the rotation, which may change its heads in place.
        value = heads[:, spec.num_heads : rotated].clone() if spec.value_is_key else heads[:, rotated:]
        value = add_and_normalize(value, None, self.value_norm, step.ops)
        query_key = self._rotate(heads[:, :rotated], step)
        query, key = query_key[:, : spec.num_heads], query_key[:, spec.num_heads :]
        key, value = step.share(index, spec.kv_layer, key, value)
        attended = step.attention(index, _scaled(query, spec, step.positions), key, value)
        return attended if gate is None else attended * gate.sigmoid()

    def _rotate(self, query_key: Tensor, step: LayerStep) -> Tensor:
        """Applies norms of queries and keys and the rotary embedding to `[T, heads + kv_heads, D]`."""
        spec = self.spec
        if self.qk_norm and not spec.norms_rotated:
            query_key = self._normalize(query_key, step.ops)
        if self.rotation is not None:
            eps = spec.qk_norm[0].eps if spec.qk_norm else 0.0
            query_key = self.rotation(query_key, step, self.attention.head_norm, eps)
        if self.qk_norm and spec.norms_rotated:
            query_key = self._normalize(query_key, step.ops)
        return query_key

    def _normalize(self, query_key: Tensor, ops: Ops) -> Tensor:
        parts = query_key.split((self.spec.num_heads, self.spec.own_kv_heads)[: len(self.qk_norm)], 1)
        normed = (
            ops.normalize(part.reshape(len(part), -1, len(norm.weight)), norm).view(part.shape)
            for part, norm in zip(parts, self.qk_norm, strict=True)
        )
        return torch.cat(list(normed), 1)


def _scaled(query: Tensor, spec: Attention, positions: Tensor) -> Tensor:
    """Scales queries where scores are not just divided by the root of the head dimension, as every attention does."""
    if spec.scale is not None:
        query = query * (spec.scale * spec.head_dim**0.5)
    return grown(query, spec, positions)


@loads(Attention)
def load_attention(spec: Attention, block: WeightReader) -> Mixer:
    """Loads attention, of latents or of keys and values."""
    if spec.latent is not None:
        return load_latent(spec, spec.latent, block)
    fused = fuses_head_norms(spec) and spec.rope is not None
    norms = () if spec.qk_norm is None else spec.qk_norm
    return AttentionLayer(
        spec,
        AttentionWeights(
            block.linear(*spec.qkv),
            block.linear(spec.output),
            _head_norm(spec, block) if fused else None,
            block.vector(spec.sink_logits) if spec.sink_logits else None,
        ),
        block.rotation(spec.rotation),
        () if fused else tuple(block.norm(norm) for norm in norms),
        block.optional_norm(spec.value_norm),
        None if spec.head_gate is None else block.linear(spec.head_gate),
    )


def _head_norm(spec: Attention, block: WeightReader) -> Tensor | None:
    if spec.qk_norm is None:
        return None
    weights = (block.vector(f"{norm.name}.weight") for norm in spec.qk_norm)
    heads = (spec.num_heads, spec.own_kv_heads)
    weight = torch.cat([weight.expand(count, -1) for weight, count in zip(weights, heads, strict=False)])
    order = None if spec.rope is None else channel_order(spec.rope, spec.head_dim)
    return weight if order is None else weight[:, order.to(weight.device)]

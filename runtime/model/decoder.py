"""The decoder and its embeddings: interprets the blocks of a family over a flattened token axis, without batches or
padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from compress.checkpoint.weights.integer import IntegerWeight, pack_bits, unpack_bits
from compress.models.spec import Attention as AttentionSpec
from compress.models.spec import Block, Rope
from runtime.backends.base import Attention, Linear, NormWeights, Ops, RowSource, RunLayers, Target, mlp_linears
from runtime.backends.span_attention import soft_cap
from runtime.core.model_config import DecoderConfig
from runtime.model.mixture import Expert, Experts
from runtime.model.xielu import Xielu


class Rotary:
    """Rotates query and key heads by their positions.

    Angles are computed in float32 for every dtype, as the models were trained and as transformers does; cosine and
    sine are then rounded to the activation dtype.

    Attributes:
        order: int64 `[D]`, channels of a head in the order in which they are rotated: then channels i and i + D / 2 are
            a pair, and pairs that do not rotate have frequency 0. Scores do not depend on an order that queries and
            keys share. None keeps them.
    """

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        rotated = int(head_dim * rope.partial)
        frequencies, scale = VARIANTS[rope.type](rope, rotated)
        still = torch.zeros((head_dim - rotated) // 2)
        # rotated = x * cos(angle) + swap_halves(x) * (-sin, +sin): a negative frequency gives the sign at no cost.
        self.frequencies = torch.cat((-frequencies, -still, frequencies, still)).to(device)
        self.scale: float | Tensor = scale
        if scale != 1.0 and rotated < head_dim:
            half = torch.cat((torch.full_like(frequencies, scale), torch.ones_like(still)))
            self.scale = half.repeat(2).to(device)
        self.dtype = dtype
        order = channel_order(rope, head_dim)
        self.order = None if order is None else order.to(device)

    def exact(self) -> Rotary:
        """Returns the same rotary embedding with angles in float64.

        In float32 an angle is off by `position * 6e-8`, too much for positions far beyond the context, whose
        differences count.
        """
        exact = copy(self)
        exact.frequencies = self.frequencies.double()
        return exact

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes cosine and signed sine `[T, 1, D]` of int64 positions `[T]`, shared by all layers of a step."""
        cos, sin = self._cos_sin(positions)
        if isinstance(self.scale, Tensor) or self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(self.dtype), sin.to(self.dtype)

    def by(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """As `at`, for moving heads that are already rotated (and scaled) by int64 `distances [T]`."""
        cos, sin = self._cos_sin(distances)
        return cos.to(self.dtype), sin.to(self.dtype)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies).unsqueeze(-2)
        return angles.cos(), angles.sin()


def channel_order(rope: Rope, head_dim: int) -> Tensor | None:
    """Returns `Rotary.order`: of every pair the first channel, then the second ones."""
    rotated = int(head_dim * rope.partial)
    if rotated == head_dim and not rope.interleaved:
        return None
    channels = torch.arange(rotated)
    pairs = channels.view(-1, 2) if rope.interleaved else channels.view(2, -1).T
    still = torch.arange(rotated, head_dim).view(2, -1).T
    return torch.cat((pairs, still)).T.flatten()


def _default(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    return 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0


def _linear(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595): positions are divided by `factor`."""
    frequencies, scale = _default(rope, head_dim)
    return frequencies / rope.options["factor"], scale


def _llama3(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those in between blended."""
    frequencies, scale = _default(rope, head_dim)
    low, high = rope.options["low_freq_factor"], rope.options["high_freq_factor"]
    cycles = rope.options["original_max_position_embeddings"] / (2 * math.pi / frequencies)  # rounds as transformers
    kept = ((cycles - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.options["factor"] + kept * frequencies, scale


def _yarn(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071), sections 3.2 to 3.4: the same blend over dimensions, and a temperature on attention."""
    frequencies, _ = _default(rope, head_dim)
    factor = rope.options["factor"]
    fast, slow = rope.options.get("beta_fast") or 32, rope.options.get("beta_slow") or 1
    context = rope.options["original_max_position_embeddings"]
    low, high = (
        head_dim * math.log(context / (cycles * 2 * math.pi)) / (2 * math.log(rope.theta)) for cycles in (fast, slow)
    )
    if rope.options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies, _yarn_scale(rope)


def _dynamic(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Dynamic NTK: up to the model's context, which no sequence here exceeds, positions are as they were."""
    return _default(rope, head_dim)


def _longrope(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753), section 3: each wavelength has a factor of its own, from one of two lists."""
    options, context = rope.options, rope.options["original_max_position_embeddings"]
    is_long = rope.length > context
    factors = torch.tensor(options["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    frequencies = 1.0 / (factors * rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    scale = options.get("scales", (options.get("attention_factor"),) * 2)[is_long]
    if scale is None:
        growth = math.log(max(options["factor"], 1.0)) / math.log(context)
        scale = math.sqrt(1 + growth)
    return frequencies, float(scale)


def _yarn_scale(rope: Rope) -> float:
    explicit = rope.options.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(rope.options["factor"]) + 1.0 if rope.options["factor"] > 1 else 1.0

    above, below = rope.options.get("mscale"), rope.options.get("mscale_all_dim")
    return temperature(above) / temperature(below) if above and below else temperature(1.0)


VARIANTS: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}


class Embedding(Protocol):
    """A matrix `[V, H]` whose rows are looked up."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds; 0 where the output head holds them."""
        ...

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Copies rows `[T, H]` of int64 `token_ids [T]` in the activation dtype."""
        ...


@dataclass(frozen=True, slots=True)
class DenseEmbedding:
    """A dense matrix; a memory-mapped weight stays mapped."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids)


class PackedEmbedding:
    """A matrix of codes, packed as stored; looked-up rows are dequantized."""

    def __init__(self, weight: IntegerWeight, target: Target) -> None:
        self.scheme, self.dtype = weight.scheme, target.dtype
        self.hidden_size = weight.shape[1]
        # One byte per code needs no packing and is faster to read.
        codes = weight.qweight if self.scheme.bits == 8 else pack_bits(weight.qweight, self.scheme.bits, 1)
        self.codes, self.scale = codes.to(target.device), weight.scales.to(target.device)
        self.zero = None if self.scheme.symmetric else weight.zero_points.to(target.device)
        self.nbytes = self.codes.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    def __call__(self, token_ids: Tensor) -> Tensor:
        codes, scale = self.codes.index_select(0, token_ids), self.scale.index_select(0, token_ids)
        if self.scheme.bits != 8:
            codes = unpack_bits(codes, self.scheme.bits, self.hidden_size, 1)
        if self.zero is None:
            zero = torch.full(scale.shape, self.scheme.midpoint, dtype=torch.uint8, device=scale.device)
        else:
            zero = self.zero.index_select(0, token_ids)
        return IntegerWeight(codes, scale, zero, self.scheme).dequantize(self.dtype)


@dataclass(frozen=True, slots=True)
class SharedEmbedding:
    """A view of the output head, which holds the matrix for both."""

    head: RowSource
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return 0

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.head.rows(token_ids, self.dtype)


def make_embedding(weight: IntegerWeight | Tensor, target: Target, head: Linear | None = None) -> Embedding:
    """Makes the embedding of a weight `[V, H]`.

    Args:
        head: the output head, when it multiplies by this same weight.
    """
    if isinstance(head, RowSource) and head.reads_rows:
        return SharedEmbedding(head, target.dtype)
    if isinstance(weight, Tensor):
        return DenseEmbedding(weight.to(target.device, target.dtype))
    return PackedEmbedding(weight, target)


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer. `qkv` and `gate_up` return their parts concatenated.

    Attributes:
        head_norm: RMSNorm weights `[heads + kv_heads, D]` of query and key heads that `Ops.rotate` computes, or None.
        qk_norm: other norms of queries and keys, each over as many channels as its weight has.
        output_norm, mlp_output_norm: norms of what attention and MLP add.
        rope: index of its rotary embedding; None for none.
        gate_up, down: of its MLP; None in a mixture.
        experts: of its mixture; None for an MLP.
        curve: activation with learned numbers; None for one with a name.
    """

    attention_norm: NormWeights | None
    qkv: Linear
    head_norm: Tensor | None
    output: Linear
    mlp_norm: NormWeights | None
    gate_up: Linear | None
    down: Linear | None
    qk_norm: tuple[NormWeights, ...] | None = None
    output_norm: NormWeights | None = None
    mlp_output_norm: NormWeights | None = None
    rope: int | None = 0
    experts: Experts | None = None
    curve: Xielu | None = None

    @property
    def nbytes(self) -> int:
        """Memory of its linears and experts."""
        parts = self.qkv, self.output, self.gate_up, self.down, self.experts
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(slots=True)
class Decoder:
    """A decoder-only model. Holds no state between calls: keys and values belong to the attention object.

    Attributes:
        embedding: maps token ids `[T]` to rows `[T, H]`.
        head: output projection `[H] -> [V]`.
        rotaries: rotary embeddings, of which each layer has one or none.
        ops: norms, rotary embedding and gating between linears.
        description: the kernel of each kind of linear, one line each.
    """

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Embedding
    layers: list[Layer]
    norm: NormWeights
    head: Linear
    rotaries: tuple[Rotary, ...]
    ops: Ops
    description: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of all weights; a head that is the embedding itself counts once."""
        return self.embedding.nbytes + self.head.nbytes + sum(layer.nbytes for layer in self.layers)

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of a model whose layers all have the same one."""
        (rotary,) = self.rotaries
        return rotary

    def for_length(self, length: int) -> Decoder:
        """Returns the model with the rotary embeddings of sequences of up to `length` tokens."""
        config = self.config.for_length(length)
        rotaries = (Rotary(*rotation, self.dtype, self.device) for rotation in config.spec.rotations)
        return replace(self, config=config, rotaries=tuple(rotaries))

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, run_layers: RunLayers | None = None
    ) -> Tensor:
        """Computes hidden states `[T, H]` before the final norm, of int64 `token_ids [T]` at int64 `positions [T]`.

        Args:
            attention: knows which tokens belong to one sequence; they may come in any order.
            run_layers: replaces everything between the embedding and the final norm.
        """
        angles = [rotary.at(positions) for rotary in self.rotaries]
        hidden = self._embed(token_ids)
        if run_layers is not None:
            return run_layers(hidden, *angles[0])
        update, nothing = None, hidden.new_empty(0)
        shared = {mixer.kv_layer: (nothing, nothing) for mixer in self.config.mixers if mixer.kv_layer is not None}
        step = _Step(positions, angles, attention, shared)
        for index, block in enumerate(self.config.spec.blocks):
            update = self._block(index, block, hidden, update, step)
        return hidden if update is None else hidden.add_(update)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Applies the final norm, `[T, H] -> [T, H]`: the last hidden state of transformers."""
        return self._normalize(hidden, None, self.norm)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Applies final norm, output head, logit scale and soft cap: `[T, H] -> [T, V]` in the dtype of the head."""
        logits, spec = self.head(self.final_norm(hidden)), self.config.spec
        logits = logits if spec.logit_scale == 1.0 else logits * spec.logit_scale
        return logits if spec.logit_softcap is None else soft_cap(logits, spec.logit_softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `head_logits`, in float32, or float64 for a float64 model."""
        logits = self.head_logits(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden, scale = self.embedding(token_ids), self.config.spec.embedding_scale
        return hidden if scale == 1.0 else hidden.mul_(torch.tensor(scale, dtype=hidden.dtype))

    def _block(self, index: int, block: Block, hidden: Tensor, update: Tensor | None, step: _Step) -> Tensor:
        """Adds `update` to `hidden`, and what mixer and MLP add except for the last of them, which it returns."""
        layer = self.layers[index]
        normed = self._normalize(hidden, update, layer.attention_norm)
        update = self._finish(block, self._attend(index, block.mixer, normed, step), layer.output_norm)
        if not block.is_parallel:
            normed = self._normalize(hidden, update, layer.mlp_norm)
        added = self._finish(block, self._mlp(block, layer, normed), layer.mlp_output_norm)
        return added.add_(update) if block.is_parallel else added

    def _mlp(self, block: Block, layer: Layer, normed: Tensor) -> Tensor:
        """Computes the MLP or mixture of a block."""
        mlp = block.mlps[0]
        activate = self.ops.activate_and_mul if mlp.gated else self.ops.activate

        def apply(expert: Expert, x: Tensor) -> Tensor:
            return expert.down(activate(expert.gate_up(x), mlp.activation))

        if layer.experts is not None:
            return layer.experts(normed, apply)
        gate_up, down = mlp_linears(layer)
        if layer.curve is not None:
            return down(layer.curve(gate_up(normed)))
        return down(activate(gate_up(normed), mlp.activation))

    def _finish(self, block: Block, update: Tensor, norm: NormWeights | None) -> Tensor:
        """Applies what a block does to an update before it is added."""
        if norm is not None:
            update = self._normalize(update, None, norm)
        return update if block.residual_scale == 1.0 else update * block.residual_scale

    def _normalize(self, hidden: Tensor, update: Tensor | None, norm: NormWeights | None) -> Tensor:
        """Adds `update` to `hidden` in place and returns the norm of the sum; without a norm, the sum itself."""
        if norm is not None and norm.is_plain:
            return self.ops.add_rms_norm(hidden, update, norm.weight, norm.eps)
        if update is not None:
            hidden.add_(update)
        return hidden if norm is None else self.ops.normalize(hidden, norm)

    def _attend(self, index: int, mixer: AttentionSpec, normed: Tensor, step: _Step) -> Tensor:
        layer, rotated = self.layers[index], mixer.num_heads + mixer.own_kv_heads
        heads = layer.qkv(normed).view(-1, rotated + mixer.own_kv_heads, mixer.head_dim)
        query_key = self._rotate(mixer, layer, heads[:, :rotated], step)
        query, key = query_key[:, : mixer.num_heads], query_key[:, mixer.num_heads :]
        key, value = step.share(index, mixer, key, heads[:, rotated:])
        attended = step.attention(index, _scaled(query, mixer, step.positions), key, value)
        return layer.output(attended.reshape(-1, mixer.num_heads * mixer.head_dim))

    def _rotate(self, mixer: AttentionSpec, layer: Layer, query_key: Tensor, step: _Step) -> Tensor:
        """Applies norms of queries and keys and the rotary embedding to `[T, heads + kv_heads, D]`."""
        if layer.qk_norm is not None and not mixer.norms_rotated:
            query_key = self._normalize_heads(mixer, layer.qk_norm, query_key)
        if layer.rope is not None:
            order = self.rotaries[layer.rope].order
            query_key = query_key if order is None else query_key.index_select(-1, order)
            query_key = self.ops.rotate(query_key, layer.head_norm, self.config.norm_eps, *step.angles[layer.rope])
        if layer.qk_norm is not None and mixer.norms_rotated:
            query_key = self._normalize_heads(mixer, layer.qk_norm, query_key)
        return query_key

    def _normalize_heads(self, mixer: AttentionSpec, norms: tuple[NormWeights, ...], query_key: Tensor) -> Tensor:
        parts = query_key.split((mixer.num_heads, mixer.own_kv_heads)[: len(norms)], 1)
        normed = (
            self.ops.normalize(part.reshape(len(part), -1, len(norm.weight)), norm).view(part.shape)
            for part, norm in zip(parts, norms, strict=True)
        )
        return torch.cat(list(normed), 1)


@dataclass(frozen=True, slots=True)
class _Step:
    """State that all layers of a step share.

    Attributes:
        angles: cosine and signed sine of each rotary embedding.
        attention: of the step.
        shared: keys and values of the layers that later ones read.
    """

    positions: Tensor
    angles: list[tuple[Tensor, Tensor]]
    attention: Attention
    shared: dict[int, tuple[Tensor, Tensor]]

    def share(self, index: int, mixer: AttentionSpec, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the key and value of a layer that others read; returns those that this layer reads."""
        if mixer.kv_layer is not None:
            return self.shared[mixer.kv_layer]
        if index in self.shared:
            self.shared[index] = key, value
        return key, value


def _scaled(query: Tensor, mixer: AttentionSpec, positions: Tensor) -> Tensor:
    """Scales queries where scores are not just divided by the root of the head dimension, as every attention does."""
    if mixer.scale is not None:
        query = query * (mixer.scale * mixer.head_dim**0.5)
    if mixer.position_scale is not None:
        spans = (positions // mixer.position_scale.length).to(torch.float32)
        growth = 1 + mixer.position_scale.beta * torch.log1p(spans)
        query = query * growth.to(query.dtype).view(-1, 1, 1)
    return query

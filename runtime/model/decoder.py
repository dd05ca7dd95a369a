"""The decoder and its embeddings: interprets the blocks of a family over a flattened token axis, without batches or
padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compress.checkpoint.weights.integer import IntegerWeight, pack_bits, unpack_bits
from compress.models.spec import Attention as AttentionSpec
from compress.models.spec import Rope
from runtime.backends.base import Attention, Linear, Ops, RowSource, RunLayers, Target
from runtime.core.model_config import DecoderConfig


class Rotary:
    """Rotates query and key heads by their positions.

    Angles are computed in float32 for every dtype, as the models were trained and as transformers does; cosine and
    sine are then rounded to the activation dtype.
    """

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, self.scale = VARIANTS[rope.type](rope, head_dim)
        # rotated = x * cos(angle) + swap_halves(x) * (-sin, +sin): a negative frequency gives the sign at no cost.
        self.frequencies = torch.cat((-frequencies, frequencies)).to(device)
        self.dtype = dtype

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
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(self.dtype), sin.to(self.dtype)

    def by(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """As `at`, for moving heads that are already rotated (and scaled) by int64 `distances [T]`."""
        cos, sin = self._cos_sin(distances)
        return cos.to(self.dtype), sin.to(self.dtype)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies).unsqueeze(-2)
        return angles.cos(), angles.sin()


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
    cycles = rope.options["original_max_position_embeddings"] * frequencies / (2 * math.pi)
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
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies, _yarn_scale(rope)


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
    "linear": _linear,
    "llama3": _llama3,
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
        head_norm: RMSNorm weights `[heads + kv_heads, D]` of query and key heads, or None.
    """

    attention_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class Decoder:
    """A decoder-only model. Holds no state between calls: keys and values belong to the attention object.

    Attributes:
        embedding: maps token ids `[T]` to rows `[T, H]`.
        head: output projection `[H] -> [V]`.
        ops: norms, rotary embedding and gating between linears.
        description: the kernel of each kind of linear, one line each.
    """

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Embedding
    layers: list[Layer]
    norm: Tensor
    head: Linear
    rotary: Rotary
    ops: Ops
    description: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of all weights; a head that is the embedding itself counts once."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return self.embedding.nbytes + self.head.nbytes + sum(linear.nbytes for linear in linears)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, run_layers: RunLayers | None = None
    ) -> Tensor:
        """Computes hidden states `[T, H]` before the final norm, of int64 `token_ids [T]` at int64 `positions [T]`.

        Args:
            attention: knows which tokens belong to one sequence; they may come in any order.
            run_layers: replaces everything between the embedding and the final norm.
        """
        cos, sin = self.rotary.at(positions)
        hidden = self.embedding(token_ids)
        if run_layers is not None:
            return run_layers(hidden, cos, sin)
        update = None
        for index, (block, layer) in enumerate(zip(self.config.spec.blocks, self.layers, strict=True)):
            normed = self.ops.add_rms_norm(hidden, update, layer.attention_norm, block.input_norm.eps)
            update = self._attend(index, block.mixer, normed, attention, cos, sin)
            normed = self.ops.add_rms_norm(hidden, update, layer.mlp_norm, block.mlp_norm.eps)
            update = layer.down(self.ops.activate_and_mul(layer.gate_up(normed), block.mlp.activation))
        return hidden if update is None else hidden.add_(update)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Applies the final norm, `[T, H] -> [T, H]`: the last hidden state of transformers."""
        return self.ops.add_rms_norm(hidden, None, self.norm, self.config.norm_eps)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Applies final norm, output head and logit scale: `[T, H] -> [T, V]` in the dtype of the head."""
        logits, scale = self.head(self.final_norm(hidden)), self.config.spec.logit_scale
        return logits if scale == 1.0 else logits * scale

    def logits(self, hidden: Tensor) -> Tensor:
        """As `head_logits`, in float32, or float64 for a float64 model."""
        logits = self.head_logits(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _attend(
        self, index: int, mixer: AttentionSpec, normed: Tensor, attention: Attention, cos: Tensor, sin: Tensor
    ) -> Tensor:
        layer, rotated = self.layers[index], mixer.num_heads + mixer.num_kv_heads
        heads = layer.qkv(normed).view(-1, rotated + mixer.num_kv_heads, mixer.head_dim)
        query_key = self.ops.rotate(heads[:, :rotated], layer.head_norm, self.config.norm_eps, cos, sin)
        attended = attention(
            index, query_key[:, : mixer.num_heads], query_key[:, mixer.num_heads :], heads[:, rotated:]
        )
        return layer.output(attended.reshape(-1, mixer.num_heads * mixer.head_dim))

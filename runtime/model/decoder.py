"""The decoder: interprets the blocks of a family over a flattened token axis, without batches or padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from compress.models.spec import Attention as AttentionSpec
from compress.models.spec import GatedMLP
from runtime.backends.base import Attention, Linear, Ops, RunLayers
from runtime.backends.torch.ops import TorchOps, activate_multiply
from runtime.core.model_config import DecoderConfig
from runtime.core.rope import Rotary
from runtime.model.embedding import Embedding


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
    ops: Ops = field(default_factory=TorchOps)
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
            update = layer.down(self._gate(block.mlp, layer.gate_up(normed)))
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

    def _gate(self, mlp: GatedMLP, gate_up: Tensor) -> Tensor:
        if mlp.activation in ("silu", "swish"):
            return self.ops.silu_and_mul(gate_up)
        return activate_multiply(gate_up, mlp.activation)

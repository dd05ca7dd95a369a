"""The decoder: interprets the blocks of a family over a flattened token axis, without batches or
padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from compress.models.block import Block
from compress.models.block_parts import Residual
from compress.models.mixers.attention import Attention as AttentionSpec
from compress.models.mlp import MLP
from runtime.backends.base import Attention, Linear, NormWeights, Ops, RunLayers, SparseAttention, mlp_linears
from runtime.backends.expert_slots import ExpertSlots
from runtime.backends.indexer import IndexedTokens
from runtime.backends.latent import LatentProducts
from runtime.backends.span_attention import soft_cap
from runtime.backends.state_memory import StepStates
from runtime.core.model_config import DecoderConfig
from runtime.model.embedding import Embedding, LayerInputsWeights
from runtime.model.mixers.latent import LatentWeights
from runtime.model.mixers.registry import RecurrentLayer
from runtime.model.mixture import Expert, Experts
from runtime.model.rotary import Rotary
from runtime.model.xielu import Xielu


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """Weights of `LayerInput`."""

    gate: Linear
    output: Linear
    norm: NormWeights

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """Weights of `Beside`."""

    experts: Experts
    mlp_norm: NormWeights
    input_norm: NormWeights
    output_norm: NormWeights
    router_norm: NormWeights


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer. `qkv` and `gate_up` return their parts concatenated.

    Attributes:
        qkv, output: of its attention; None in a layer with a state.
        head_norm: RMSNorm weights `[heads + kv_heads, D]` of query and key heads that `Ops.rotate` computes, or None.
        qk_norm: other norms of queries and keys, each over as many channels as its weight has.
        output_norm, mlp_output_norm: norms of what attention and MLP add.
        rope: index of its rotary embedding; None for none.
        gate_up, down: of its MLP; None in a mixture.
        experts: of its mixture; None for an MLP.
        curve: activation with learned numbers; None for one with a name.
        value_norm: norm of value heads.
        beside: of a mixture beside the MLP.
        input: of what is added last.
        scalar: factor `[1]` on the residual stream.
        head_gate: a number for each head of attention, whose sigmoid multiplies what the head gives.
        sink_logits: `[heads]`, see `runtime.backends.span_attention.add_sink_key`.
        recurrent: its mixer with a state; None for attention.
        latent: of latent attention, whose first projections `qkv` are.
    """

    attention_norm: NormWeights | None
    qkv: Linear | None
    head_norm: Tensor | None
    output: Linear | None
    mlp_norm: NormWeights | None
    gate_up: Linear | None
    down: Linear | None
    qk_norm: tuple[NormWeights, ...] | None = None
    output_norm: NormWeights | None = None
    mlp_output_norm: NormWeights | None = None
    rope: int | None = 0
    experts: Experts | None = None
    curve: Xielu | None = None
    value_norm: NormWeights | None = None
    beside: BesideWeights | None = None
    input: LayerInputWeights | None = None
    scalar: Tensor | None = None
    sink_logits: Tensor | None = None
    head_gate: Linear | None = None
    recurrent: RecurrentLayer | None = None
    latent: LatentWeights | None = None

    @property
    def latent_heads(self) -> LatentProducts | None:
        """Weights that make keys and values of latents."""
        return None if self.latent is None else self.latent.heads

    @property
    def nbytes(self) -> int:
        """Memory of its linears and experts."""
        beside = None if self.beside is None else self.beside.experts
        inner = self.latent, self.recurrent, self.head_gate
        parts = self.qkv, *inner, self.output, self.gate_up, self.down, self.experts, beside, self.input
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(slots=True)
class Activations:
    """Activations of the tokens of a step between two layers.

    Attributes:
        hidden: residual stream `[T, H]`.
        update: `[T, H]`, left to add to it; None for nothing.
        inputs: `[T, layers, size]`, see `LayerInputsWeights`; empty without them.
        shared: keys and values of the layers that later ones read.
    """

    hidden: Tensor
    update: Tensor | None
    inputs: Tensor
    shared: dict[int, tuple[Tensor, Tensor]]

    def finish(self) -> Tensor:
        """Returns hidden states `[T, H]` behind the last layer."""
        return self.hidden if self.update is None else self.hidden.add_(self.update)


@dataclass(slots=True)
class Decoder:
    """A decoder-only model. Holds no state between calls: keys and values belong to the attention object.

    Attributes:
        embedding: maps token ids `[T]` to rows `[T, H]`.
        head: output projection `[H] -> [V]`.
        rotaries: rotary embeddings, of which each layer has one or none.
        ops: norms, rotary embedding and gating between linears.
        layer_inputs: what layers with an `input` read.
        description: the kernel of each kind of linear, one line each.
        linears: number of linears by their names, form and kernel.
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
    layer_inputs: LayerInputsWeights | None = None
    linears: Mapping[tuple[str, str, str], int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory of all weights; a head that is the embedding itself counts once."""
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.nbytes
        return self.embedding.nbytes + self.head.nbytes + inputs + sum(layer.nbytes for layer in self.layers)

    @property
    def expert_slots(self) -> tuple[ExpertSlots, ...]:
        """Slots of all mixtures with experts in host memory."""
        besides = (layer.beside.experts for layer in self.layers if layer.beside is not None)
        mixtures = chain((layer.experts for layer in self.layers), besides)
        return tuple(experts.slots for experts in mixtures if experts is not None and experts.slots is not None)

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

    def for_streams(self) -> Decoder:
        """Returns the model with exact angles, see `Rotary.exact`."""
        return replace(self, rotaries=tuple(rotary.exact() for rotary in self.rotaries))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        run_layers: RunLayers | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Computes hidden states `[T, H]` before the final norm, of int64 `token_ids [T]` at int64 `positions [T]`.

        Args:
            attention: knows which tokens belong to one sequence; they may come in any order.
            run_layers: replaces everything between the embedding and the final norm.
            states: of recurrent layers; rows must be in their order then.
        """
        return self.run_blocks(self.embed(token_ids), token_ids, positions, attention, run_layers, states)

    def run_blocks(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        run_layers: RunLayers | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """As `forward`, from `hidden [T, H]` in place of the embedding of the tokens; changes `hidden` in place."""
        if run_layers is not None:
            return run_layers(hidden, *self.rotaries[0].at(positions))
        passing = self.begin(hidden, token_ids)
        self.advance(range(len(self.config.spec.blocks)), passing, positions, attention, states)
        return passing.finish()

    def begin(self, hidden: Tensor, token_ids: Tensor) -> Activations:
        """Returns what the first layer reads of `hidden [T, H]`, which layers change in place."""
        nothing = hidden.new_empty(0)
        shared = {mixer.kv_layer: (nothing, nothing) for mixer in self.config.mixers if mixer.kv_layer is not None}
        inputs = nothing if self.layer_inputs is None else self.layer_inputs(token_ids, hidden, self.ops)
        return Activations(hidden, None, inputs, shared)

    def advance(
        self,
        layers: Iterable[int],
        passing: Activations,
        positions: Tensor,
        attention: Attention,
        states: StepStates | None = None,
    ) -> None:
        """Passes activations through some layers, in order; see `forward`."""
        angles = [rotary.at(positions) for rotary in self.rotaries]
        step = _Step(positions, angles, attention, passing.shared, passing.inputs, states)
        for index in layers:
            passing.update = self._block(index, self.config.spec.blocks[index], passing.hidden, passing.update, step)

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

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns what the first layer reads, `[T, H]`, of int64 `token_ids [T]`."""
        hidden, scale = self.embedding(token_ids), self.config.spec.embedding_scale
        return hidden if scale == 1.0 else hidden.mul_(torch.tensor(scale, dtype=hidden.dtype))

    def _block(self, index: int, block: Block, hidden: Tensor, update: Tensor | None, step: _Step) -> Tensor | None:
        """Adds `update` to `hidden`, and what the block adds except for what it returns."""
        layer = self.layers[index]
        if block.mixer is not None:
            normed = self._normalize(hidden, update, layer.attention_norm)
            _keep(block.residual, 0, hidden, normed)
            update = self._finish(block, 0, self._mix(index, block, normed, step), layer.output_norm)
        if block.mlp is None:
            return update
        if not block.is_parallel:
            normed = self._normalize(hidden, update, layer.mlp_norm)
            _keep(block.residual, 1, hidden, normed)
        added = self._mlp(block, layer, normed)
        if layer.beside is not None and block.beside is not None:
            added = self._mix_beside(block.beside.mixture.mlps[0], layer.beside, hidden, added)
        added = self._finish(block, 1, added, layer.mlp_output_norm)
        added = added.add_(update) if block.is_parallel and update is not None else added
        return self._close(index, block, hidden, added, step)

    def _close(self, index: int, block: Block, hidden: Tensor, update: Tensor, step: _Step) -> Tensor | None:
        """Adds the layer's own input and scales the residual stream; returns an update that is left to add."""
        layer = self.layers[index]
        if layer.input is None and layer.scalar is None:
            return update
        hidden.add_(update)
        if layer.input is not None and block.layer_input is not None:
            gate = self.ops.activate(layer.input.gate(hidden), block.layer_input.activation)
            added = layer.input.output(gate * step.inputs[:, index])
            hidden.add_(self._normalize(added, None, layer.input.norm))
        if layer.scalar is not None:
            hidden.mul_(layer.scalar)
        return None

    def _mlp(self, block: Block, layer: Layer, normed: Tensor) -> Tensor:
        """Computes the MLP or mixture of a block."""
        mlp = block.mlps[0]
        if layer.experts is not None:
            return layer.experts(normed, partial(self._apply, mlp))
        expert = Expert(*mlp_linears(layer))
        if layer.curve is not None:
            return expert.down(layer.curve(expert.gate_up(normed)))
        return self._apply(mlp, expert, normed)

    def _apply(self, mlp: MLP, expert: Expert, x: Tensor) -> Tensor:
        """Computes an MLP with the weights of one expert."""
        added, (_, factor) = expert.down(self._activate(mlp, expert.gate_up(x))), mlp.factors
        return added if factor == 1.0 else added * factor

    def _activate(self, mlp: MLP, gate_up: Tensor) -> Tensor:
        if mlp.factors[0] != 1.0:
            gate, up = gate_up.chunk(2, -1)
            gate_up = torch.cat((gate * mlp.factors[0], up), -1)
        if mlp.clamped is not None:
            return self.ops.clamp_and_mul(gate_up, mlp.clamped)
        return (self.ops.activate_and_mul if mlp.gated else self.ops.activate)(gate_up, mlp.activation)

    def _mix_beside(self, mlp: MLP, beside: BesideWeights, hidden: Tensor, added: Tensor) -> Tensor:
        """Adds the mixture beside an MLP that gave `added`."""
        routed, read = (self._normalize(hidden, None, norm) for norm in (beside.router_norm, beside.input_norm))
        mixed = beside.experts(read, partial(self._apply, mlp), routed)
        return self._normalize(added, None, beside.mlp_norm) + self._normalize(mixed, None, beside.output_norm)

    def _finish(self, block: Block, part: int, update: Tensor, norm: NormWeights | None) -> Tensor:
        """Applies what a block does to an update of its mixer (0) or MLP (1) before it is added."""
        if norm is not None:
            update = self._normalize(update, None, norm)
        return update if block.residual is None else update * block.residual.scales[part]

    def _normalize(self, hidden: Tensor, update: Tensor | None, norm: NormWeights | None) -> Tensor:
        """Adds `update` to `hidden` in place and returns the norm of the sum; without a norm, the sum itself."""
        if norm is not None and norm.is_plain:
            return self.ops.add_rms_norm(hidden, update, norm.weight, norm.eps)
        if update is not None:
            hidden.add_(update)
        return hidden if norm is None else self.ops.normalize(hidden, norm)

    def _mix(self, index: int, block: Block, normed: Tensor, step: _Step) -> Tensor:
        """Computes attention, a mixer with a state, or both. Raises ValueError for states that are not given."""
        recurrent, second = self.layers[index].recurrent, block.second
        if recurrent is None:
            return self._mix_attention(index, block, normed, step)
        if step.states is None:
            raise ValueError(f"layer {index} needs the states of its sequences")
        compute = partial(_compute, recurrent, index, self.ops)
        if second is None:
            return step.states.mix(index, normed, compute)
        (before, after), (first, last) = second.attention_factors, second.factors
        attended = self._mix_attention(index, block, normed * before, step) * after
        return attended + step.states.mix(index, normed * first, compute) * last

    def _mix_attention(self, index: int, block: Block, normed: Tensor, step: _Step) -> Tensor:
        layer = self.layers[index]
        if layer.qkv is None or layer.output is None or not isinstance(block.mixer, AttentionSpec):
            raise ValueError(f"layer {index} has no attention")
        heads = layer.qkv(normed)
        if layer.latent is not None:
            return layer.output(self._attend_latents(index, block.mixer, layer.latent, normed, heads, step).flatten(1))
        attended = self._attend(index, block.mixer, heads.view(len(heads), -1, block.mixer.head_dim), step)
        if layer.head_gate is not None:
            gate = layer.head_gate(normed).sigmoid().unsqueeze(-1)
            attended = (attended.view(len(heads), -1, block.mixer.head_dim) * gate).flatten(1)
        return layer.output(attended)

    def _attend(self, index: int, mixer: AttentionSpec, heads: Tensor, step: _Step) -> Tensor:
        """Computes the output `[T, heads * D]` of attention from its projections `[T, all heads, D]`."""
        layer, rotated, gate = self.layers[index], mixer.num_heads + mixer.own_kv_heads, None
        if mixer.output_gate:
            queries, others = heads.tensor_split([2 * mixer.num_heads], 1)
            query, gate = queries.unflatten(1, (-1, 2)).unbind(2)
            heads = torch.cat((query, others), 1)
        # Before the rotation, which may change its heads in place.
        value = heads[:, mixer.num_heads : rotated].clone() if mixer.value_is_key else heads[:, rotated:]
        value = self._normalize(value, None, layer.value_norm)
        query_key = self._rotate(mixer, layer, heads[:, :rotated], step)
        query, key = query_key[:, : mixer.num_heads], query_key[:, mixer.num_heads :]
        key, value = step.share(index, mixer, key, value)
        attended = step.attention(index, _scaled(query, mixer, step.positions), key, value)
        attended = attended if gate is None else attended * gate.sigmoid()
        return attended.reshape(-1, mixer.num_heads * mixer.head_dim)

    def _attend_latents(
        self, index: int, mixer: AttentionSpec, weights: LatentWeights, normed: Tensor, projected: Tensor, step: _Step
    ) -> Tensor:
        """Computes `[T, heads, V]` of what the first projections of latent attention give for `normed`."""
        query, latent, key, source = weights.read(projected, self.ops)
        if weights.indexer is not None:
            angles = step.angles[self.layers[index].rope or 0]
            step.choose(index, weights.indexer.read(normed, source, angles, self.ops))
        own, beside = weights.beside(query.view(len(query), mixer.num_heads, -1), key)
        beside = self._rotate(mixer, self.layers[index], beside, step)
        query = _grown(torch.cat((own, beside[:, :-1]), -1), mixer, step.positions)
        return step.attention(index, query, beside[:, -1:], latent.unsqueeze(1))

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
        inputs: `[T, layers, size]`, see `LayerInputsWeights`.
        states: of recurrent layers.
    """

    positions: Tensor
    angles: list[tuple[Tensor, Tensor]]
    attention: Attention
    shared: dict[int, tuple[Tensor, Tensor]]
    inputs: Tensor
    states: StepStates | None

    def choose(self, index: int, tokens: IndexedTokens) -> None:
        """Chooses the tokens that this layer sees, and later ones without an indexer of their own.

        Raises:
            ValueError: an attention that cannot leave tokens out.
        """
        if not isinstance(self.attention, SparseAttention):
            raise ValueError(f"layer {index} chooses tokens, and {type(self.attention).__name__} sees all")
        self.attention.choose(index, tokens)

    def share(self, index: int, mixer: AttentionSpec, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the key and value of a layer that others read; returns those that this layer reads."""
        if mixer.kv_layer is not None:
            return self.shared[mixer.kv_layer]
        if index in self.shared:
            self.shared[index] = key, value
        return key, value


def _compute(recurrent: RecurrentLayer, layer: int, ops: Ops, x: Tensor, states: StepStates) -> Tensor:
    return recurrent(x, layer, states, ops)


def _keep(residual: Residual | None, part: int, hidden: Tensor, normed: Tensor) -> None:
    """Replaces the residual stream by its norm before the mixer (0) or MLP (1), in blocks that do so."""
    if residual is not None and residual.kept is not None:
        torch.mul(normed, residual.kept[part], out=hidden)


def _scaled(query: Tensor, mixer: AttentionSpec, positions: Tensor) -> Tensor:
    """Scales queries where scores are not just divided by the root of the head dimension, as every attention does."""
    if mixer.scale is not None:
        query = query * (mixer.scale * mixer.head_dim**0.5)
    return _grown(query, mixer, positions)


def _grown(query: Tensor, mixer: AttentionSpec, positions: Tensor) -> Tensor:
    """Scales queries that grow with their position."""
    if mixer.position_scale is not None:
        spans = (positions + mixer.position_scale.first) // mixer.position_scale.length
        growth = 1 + mixer.position_scale.beta * torch.log1p(spans.to(torch.float32))
        query = query * growth.to(query.dtype).view(-1, 1, 1)
    return query

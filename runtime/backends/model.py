"""Models and their layers, as runners drive them and as kernels read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.models.block_parts import Residual
from compress.models.cuts import Cut
from runtime.backends.base import (
    Attention,
    Gather,
    Linear,
    NormWeights,
    Ops,
    Rotary,
    RunLayers,
    SparseAttention,
    Sum,
    add_and_normalize,
)
from runtime.backends.expert_slots import ExpertSlots
from runtime.backends.indexer import IndexedTokens
from runtime.backends.latent import LatentProducts
from runtime.backends.mlp import DenseMLP, Experts, FeedForward, MLPAndMixture
from runtime.backends.scores import Scores
from runtime.backends.state_memory import StateMemory, StepStates, TokenStates
from runtime.core.model_config import DecoderConfig
from runtime.core.state_rows import whole_state_rows


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Inputs that all layers of a step share.

    Attributes:
        positions: int64 `[T]`.
        angles: cosine and signed sine of each rotary embedding.
        attention: of the step.
        shared: keys and values of the layers that later ones read.
        inputs: `[T, layers, size]`, see `compress.models.block_parts.LayerInputs`.
        states: of recurrent layers.
    """

    positions: Tensor
    angles: Sequence[tuple[Tensor, Tensor]]
    attention: Attention
    shared: dict[int, tuple[Tensor, Tensor]]
    inputs: Tensor
    states: StepStates | None
    ops: Ops

    def choose(self, index: int, tokens: IndexedTokens) -> None:
        """Chooses the tokens that a layer sees, and later ones without an indexer of their own.

        Raises:
            ValueError: an attention that cannot leave tokens out.
        """
        if not isinstance(self.attention, SparseAttention):
            raise ValueError(f"layer {index} chooses tokens, and {type(self.attention).__name__} sees all")
        self.attention.choose(index, tokens)

    def share(self, index: int, source: int | None, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the key and value of a layer that others read; returns those that this layer reads."""
        if source is not None:
            return self.shared[source]
        if index in self.shared:
            self.shared[index] = key, value
        return key, value


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of attention, as kernels read them. `qkv` returns its parts concatenated.

    Attributes:
        head_norm: RMSNorm weights `[heads + kv_heads, D]` of query and key heads that `Ops.rotate` computes, or None.
        sink_logits: `[heads]`, see `runtime.backends.span_attention.add_sink_key`.
        latent_heads: what makes keys and values of latents.
    """

    qkv: Linear
    output: Linear
    head_norm: Tensor | None = None
    sink_logits: Tensor | None = None
    latent_heads: LatentProducts | None = None


class Mixer(Protocol):
    """Weights of a mixer, and what computes it in plain torch: one file of `runtime.model.mixers`."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""

    @property
    def attention(self) -> AttentionWeights | None:
        """Weights of its attention; None for a mixer without any."""

    def __call__(self, x: Tensor, index: int, step: LayerStep) -> Tensor:
        """Computes `[T, H]` of `x [T, H]` in layer `index`."""


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """Weights of `compress.models.block_parts.LayerInput`."""

    gate: Linear
    output: Linear
    norm: NormWeights
    activation: str

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.output.nbytes

    def __call__(self, hidden: Tensor, row: Tensor, ops: Ops) -> Tensor:
        """Computes what is added to `hidden [T, H]` of the layer's input `row [T, size]`."""
        added = self.output(ops.activate(self.gate(hidden), self.activation) * row)
        return add_and_normalize(added, None, self.norm, ops)


@dataclass(frozen=True, slots=True)
class ResidualRule:
    """Rule for reading the residual stream, and for adding mixer (0) and MLP (1) to it.

    Attributes:
        norms: of what mixer and MLP add.
        factors: on the stream and on what is added; None for none.
        is_parallel: the MLP reads what the mixer reads.
        input: of what is added last.
        scalar: factor `[1]` on the stream, applied last.
    """

    norms: tuple[NormWeights | None, NormWeights | None] = (None, None)
    factors: Residual | None = None
    is_parallel: bool = False
    input: LayerInputWeights | None = None
    scalar: Tensor | None = None

    def read(self, part: int, hidden: Tensor, update: Tensor | None, norm: NormWeights | None, ops: Ops) -> Tensor:
        """Adds `update` to `hidden` in place; returns what mixer or MLP reads."""
        normed = add_and_normalize(hidden, update, norm, ops)
        if self.factors is not None and self.factors.kept is not None:
            torch.mul(normed, self.factors.kept[part], out=hidden)
        return normed

    def finish(self, part: int, added: Tensor, ops: Ops) -> Tensor:
        """Applies norm and factor to what mixer or MLP adds."""
        norm = self.norms[part]
        added = added if norm is None else add_and_normalize(added, None, norm, ops)
        return added if self.factors is None else added * self.factors.scales[part]

    def close(self, index: int, hidden: Tensor, update: Tensor, step: LayerStep) -> Tensor | None:
        """Adds the layer's own input and scales the stream; returns an update that is left to add."""
        if self.input is None and self.scalar is None:
            return update
        hidden.add_(update)
        if self.input is not None:
            hidden.add_(self.input(hidden, step.inputs[:, index], step.ops))
        if self.scalar is not None:
            hidden.mul_(self.scalar)
        return None


PLAIN_RESIDUAL = ResidualRule()


@dataclass(slots=True)
class Layer:
    """A layer of a decoder: norm, mixer, norm, MLP and a rule for the residual stream; see `compress.models.block`.

    Attributes:
        sums: sum up what all ranks compute of mixer (0) and MLP (1), and keep the rows of this one; None where that is
            whole.
        gather: makes the rows of all tokens, which linears read, of those that this rank has.
    """

    norm: NormWeights | None = None
    mixer: Mixer | None = None
    mlp_norm: NormWeights | None = None
    mlp: FeedForward | None = None
    residual: ResidualRule = PLAIN_RESIDUAL
    sums: tuple[Sum | None, Sum | None] = (None, None)
    gather: Gather | None = None

    def __call__(self, index: int, hidden: Tensor, update: Tensor | None, step: LayerStep) -> Tensor | None:
        """Adds `update` to `hidden`, both `[T, H]`, and what the layer adds except for what it returns.

        Ranks that share the tokens of a long step have their own ones in both.
        """
        rule, ops, normed = self.residual, step.ops, hidden
        if self.mixer is not None:
            normed = self._gathered(rule.read(0, hidden, update, self.norm, ops), step)
            update = rule.finish(0, self._whole(0, self.mixer(normed, index, step)), ops)
        if self.mlp is None:
            return update
        if not rule.is_parallel:
            normed = rule.read(1, hidden, update, self.mlp_norm, ops)
        added = rule.finish(1, self._feed_forward(self.mlp, normed, hidden, step), ops)
        added = added.add_(update) if rule.is_parallel and update is not None else added
        return rule.close(index, hidden, added, step)

    def _feed_forward(self, mlp: FeedForward, x: Tensor, hidden: Tensor, step: LayerStep) -> Tensor:
        if isinstance(mlp, Experts) and mlp.exchange is not None and len(x) < len(step.positions):
            return mlp.exchanged(x, mlp.exchange, step.ops)
        return self._whole(1, mlp(self._gathered(x, step), hidden, step.ops))

    def _gathered(self, own: Tensor, step: LayerStep) -> Tensor:
        return own if self.gather is None else self.gather(own, len(step.positions))

    def _whole(self, part: int, added: Tensor) -> Tensor:
        add_up = self.sums[part]
        return added if add_up is None else add_up(added)

    @property
    def nbytes(self) -> int:
        """Memory of its linears and experts."""
        return sum(part.nbytes for part in (self.mixer, self.mlp, self.residual.input) if part is not None)

    @property
    def attention(self) -> AttentionWeights | None:
        """Weights of its attention; None for a layer without any."""
        return None if self.mixer is None else self.mixer.attention

    @property
    def experts(self) -> Experts | None:
        """Weights of its mixture; None for a layer without any."""
        mixture = self.mlp.mixture if isinstance(self.mlp, MLPAndMixture) else self.mlp
        return mixture if isinstance(mixture, Experts) else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Linears of its attention, and of its MLP unless that is a mixture."""
        attention = () if self.attention is None else (self.attention.qkv, self.attention.output)
        return *attention, *(
            (self.mlp.weights.gate_up, self.mlp.weights.down) if isinstance(self.mlp, DenseMLP) else ()
        )


class StageEnd(Protocol):
    """Connection of a stage of a model with those before and after it."""

    @property
    def num_stages(self) -> int: ...

    def pass_on(self, hidden: Tensor, inputs: Tensor) -> None:
        """Sends hidden states `[T, H]`, and inputs of layers if there are any, to the next stage if there is one."""

    def collect(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states `[T, H]` after the last stage to the first rank, in the memory of its own, and the
        rank's own to others."""


@dataclass(slots=True)
class Model(ABC):
    """A decoder-only model without state between calls: keys and values belong to the attention object.

    Attributes:
        ops: norms, rotary embedding and gating between linears.
        layers: those that kernels may compute; none where modeling code of transformers computes the model.
        description: the kernel of each kind of linear, one line each.
        linears: number of linears by their names, form and kernel.
        end: passes hidden states between stages; None for a model that is not divided.
        modules: linears with the modules of the checkpoint that are side by side in them: name and output features.
        cuts: parts of matrices that this rank holds, by their full names; others are whole.
    """

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    layers: Sequence[Layer]
    description: tuple[str, ...] = field(default=(), kw_only=True)
    linears: Mapping[tuple[str, str, str], int] = field(default_factory=dict, kw_only=True)
    end: StageEnd | None = field(default=None, kw_only=True)
    modules: Sequence[tuple[tuple[tuple[str, int], ...], Linear]] = field(default=(), kw_only=True)
    cuts: Mapping[str, Cut] = field(default_factory=dict, kw_only=True)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory of all weights; one that is used twice counts once."""

    @property
    @abstractmethod
    def rotary(self) -> Rotary:
        """The rotary embedding of a model whose layers all have the same one."""

    @property
    @abstractmethod
    def scores(self) -> Scores:
        """Changes that the model makes to the scores of its attention."""

    @abstractmethod
    def for_length(self, length: int) -> Model:
        """Returns the model for sequences of up to `length` tokens."""

    @abstractmethod
    def for_streams(self) -> Model:
        """Returns the model for positions far beyond its context."""

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        run_layers: RunLayers | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Computes hidden states `[T, H]` before the final norm, or after the last layer of a stage.

        Args:
            token_ids, positions: int64 `[T]`.
            attention: knows which tokens belong to one sequence; they may come in any order.
            run_layers: replaces everything between the embedding and the final norm.
            states: of recurrent layers; rows must be in their order then.
        """

    @abstractmethod
    def final_norm(self, hidden: Tensor) -> Tensor:
        """Applies the final norm, `[T, H] -> [T, H]`: the last hidden state of transformers."""

    @abstractmethod
    def head_logits(self, hidden: Tensor) -> Tensor:
        """Computes logits `[T, V]` of what `forward` returns, in the dtype of the head."""

    def logits(self, hidden: Tensor) -> Tensor:
        """As `head_logits`, in float32, or float64 for a float64 model."""
        logits = self.head_logits(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    @property
    def expert_slots(self) -> tuple[ExpertSlots, ...]:
        """Slots on the device of all mixtures with experts in host memory."""
        mixtures = (layer.experts for layer in self.layers)
        return tuple(experts.slots for experts in mixtures if experts is not None and experts.slots is not None)

    def whole_states(self, lengths: Sequence[int], kept: str = STATE_FLOAT32) -> StepStates | None:
        """Returns states of sequences that are computed at once, from their first to their last token; None for a model
        without recurrent layers.

        Args:
            lengths: of the sequences.
            kept: dtype to which states are rounded after every token, of sequences of one length; float32 for none.
        """
        fields = self.config.state_fields
        if not fields:
            return None
        memory = StateMemory(fields, len(lengths), self.dtype, self.device, kept=kept)
        rows = whole_state_rows(lengths, self.device)
        if kept == STATE_FLOAT32:
            return StepStates(rows, memory.tensors)
        return TokenStates(rows, memory.tensors, memory.wide)

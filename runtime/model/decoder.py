"""The decoder: computes the layers of a family over a flattened token axis, without batches or padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.backends.base import Attention, Gather, Linear, NormWeights, RunLayers, add_and_normalize
from runtime.backends.model import LayerStep, Model
from runtime.backends.scores import PLAIN_SCORES, Scores
from runtime.backends.span_attention import soft_cap
from runtime.backends.state_memory import StepStates
from runtime.model.embedding import Embedding, LayerInputsWeights
from runtime.model.rotary import Rotary
from runtime.parallel.passing import PassedInputs


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
        """Returns hidden states `[T, H]` after the last layer."""
        return self.hidden if self.update is None else self.hidden.add_(self.update)


@dataclass(slots=True)
class Decoder(Model):
    """A decoder of a registered family.

    Attributes:
        embedding: maps token ids `[T]` to rows `[T, H]`.
        head: output projection `[H] -> [V]`.
        rotaries: rotary embeddings, of which each layer has one or none.
        layer_inputs: what layers with an input of their own read.
        gather: makes hidden states of all tokens of those that this rank has; None where it has all.
    """

    embedding: Embedding
    norm: NormWeights
    head: Linear
    rotaries: tuple[Rotary, ...]
    layer_inputs: LayerInputsWeights | PassedInputs | None = None
    gather: Gather | None = None

    @property
    def nbytes(self) -> int:
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.nbytes
        return self.embedding.nbytes + self.head.nbytes + inputs + sum(layer.nbytes for layer in self.layers)

    @property
    def rotary(self) -> Rotary:
        (rotary,) = self.rotaries
        return rotary

    @property
    def scores(self) -> Scores:
        config = self.config
        if not config.spec.attentions:
            return PLAIN_SCORES
        weights = [layer.attention for layer in self.layers]
        sinks = tuple(None if each is None else each.sink_logits for each in weights)
        sinks = sinks if any(mixer.sink_logits for mixer in config.spec.attentions) else ()
        if config.mixer.latent is None:
            return Scores(config.mixer.softcap, config.chunks, sinks)
        latents = tuple(None if each is None else each.latent_heads for each in weights)
        return Scores(config.mixer.softcap, config.chunks, sinks, latents, config.index_sources)

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
            passing = Activations(run_layers(hidden, *self.rotaries[0].at(positions)), None, hidden.new_empty(0), {})
        else:
            passing = self.begin(hidden, token_ids)
            self.advance(range(len(self.layers)), passing, positions, attention, states)
        hidden = passing.finish()
        if self.end is not None:
            self.end.pass_on(hidden, passing.inputs)
        return hidden if self.gather is None else self.gather(hidden, len(token_ids))

    def begin(self, hidden: Tensor, token_ids: Tensor) -> Activations:
        """Returns what the first layer reads of `hidden [T, H]`, which layers change in place."""
        nothing = hidden.new_empty(0)
        sources = enumerate(self.config.kv_sources)
        shared = {source: (nothing, nothing) for layer, source in sources if source not in (layer, -1)}
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
        step = LayerStep(positions, angles, attention, passing.shared, passing.inputs, states, self.ops)
        for index in layers:
            passing.update = self.layers[index](index, passing.hidden, passing.update, step)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return add_and_normalize(hidden, None, self.norm, self.ops)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Applies final norm, output head, logit scale and soft cap, `[T, H] -> [T, V]`."""
        logits, spec = self.head(self.final_norm(hidden)), self.config.spec
        logits = logits if spec.logit_scale == 1.0 else logits * spec.logit_scale
        return logits if spec.logit_softcap is None else soft_cap(logits, spec.logit_softcap)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns what the first layer reads, `[T, H]`, of int64 `token_ids [T]`."""
        hidden, scale = self.embedding(token_ids), self.config.spec.embedding_scale
        return hidden if scale == 1.0 else hidden.mul_(torch.tensor(scale, dtype=hidden.dtype))

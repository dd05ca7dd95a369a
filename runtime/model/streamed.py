"""A model of which one layer is in memory at a time, and windows of text on their way through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.common.errors import CheckpointError
from compress.models.generic import CodeSpec
from runtime.backends.model import Layer
from runtime.core.model_config import DecoderConfig
from runtime.model.decoder import Activations, Decoder
from runtime.model.loader import DecoderLoader, open_weights
from runtime.model.scoring import whole_attention, whole_rows
from runtime.model.weight_reader import WeightReader


@dataclass(slots=True)
class PartialPass:
    """A forward pass over whole windows that stopped between two layers.

    Attributes:
        num_layers: layers that are computed.
        passing: activations of the tokens, window by window.
        chosen: the last layer that chose which tokens are seen, and a mask `[T, T]` of each window; see `ChosenTokens`.
    """

    num_layers: int
    passing: Activations
    chosen: tuple[int, Sequence[Tensor | None]] = (-1, ())

    def tensors(self) -> dict[str, Tensor]:
        """Returns everything but numbers and empty tensors, by name."""
        passing, (_, masks) = self.passing, self.chosen
        named = {"hidden": passing.hidden, "update": passing.update, "inputs": passing.inputs}
        for layer, (key, value) in passing.shared.items():
            named |= {f"{_KEY}{layer}": key, f"{_VALUE}{layer}": value}
        named |= {f"{_MASK}{index}": mask for index, mask in enumerate(masks)}
        return {name: tensor for name, tensor in named.items() if tensor is not None and tensor.numel()}

    def numbers(self) -> dict[str, Any]:
        """Returns plain values that `of` needs in addition to the tensors."""
        layer, masks = self.chosen
        return {"layers": self.num_layers, "chosen": [layer, len(masks)], "shared": list(self.passing.shared)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> PartialPass:
        """Returns the pass with these `tensors` and `numbers`."""
        hidden, (layer, count) = tensors["hidden"], numbers["chosen"]
        nothing = hidden.new_empty(0)
        pairs = {each: (f"{_KEY}{each}", f"{_VALUE}{each}") for each in numbers["shared"]}
        shared = {
            each: (tensors.get(key, nothing), tensors.get(value, nothing)) for each, (key, value) in pairs.items()
        }
        passing = Activations(hidden, tensors.get("update"), tensors.get("inputs", nothing), shared)
        masks = [tensors.get(f"{_MASK}{index}") for index in range(count)]
        return cls(numbers["layers"], passing, (layer, masks))


_KEY, _VALUE, _MASK = "key.", "value.", "mask."


@dataclass(frozen=True, slots=True)
class StreamedModel:
    """A checkpoint of a registered family. Every part is read when it is asked for, and not kept.

    Attributes:
        frame: the decoder without embedding, layers and head.
    """

    loader: DecoderLoader
    frame: Decoder

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kernels: str = "auto",
        as_dense: bool = False,
        trust_remote_code: bool = False,
    ) -> StreamedModel:
        """Opens a checkpoint with the kernels that `runtime.model.loader.load_model` would choose.

        Raises:
            CheckpointError: see `load_model`, and `of`.
        """
        return cls.of(*open_weights(path, device, dtype, kernels, as_dense, trust_remote_code))

    @classmethod
    def of(cls, config: DecoderConfig, reader: WeightReader) -> StreamedModel:
        """Returns the model that a reader prepares.

        Raises:
            CheckpointError: modeling code of transformers or of the folder computes it.
        """
        if isinstance(config.spec, CodeSpec):
            raise CheckpointError(
                f"{reader.checkpoint.path} cannot be streamed: the modeling code of model type {config.model_type!r} "
                "computes all of its layers at once",
                "Leave --stream out, on a machine with memory for the whole model",
            )
        loader = DecoderLoader(config, reader)
        return cls(loader, loader.frame())

    @property
    def config(self) -> DecoderConfig:
        return self.frame.config

    @property
    def num_layers(self) -> int:
        return len(self.config.spec.blocks)

    def with_embedding(self) -> Decoder:
        """Returns the decoder with what `begin` needs."""
        return replace(self.frame, embedding=self.loader.embedding(), layer_inputs=self.loader.layer_inputs())

    def with_head(self) -> Decoder:
        """Returns the decoder with what makes logits of hidden states."""
        return replace(self.frame, head=self.loader.head())

    def with_layer(self, index: int) -> Decoder:
        """Returns the decoder with one layer."""
        layers = [Layer()] * self.num_layers
        layers[index] = self.loader.layer(index)
        return replace(self.frame, layers=layers)

    def release(self) -> None:
        """Gives pages of the files back to the system."""
        self.loader.reader.checkpoint.files.release()


@torch.inference_mode()
def begin(decoder: Decoder, tokens: Tensor) -> PartialPass:
    """Embeds whole windows, int64 `[B, T]`; see `StreamedModel.with_embedding`."""
    flat = tokens.to(decoder.device).flatten()
    return PartialPass(0, decoder.begin(decoder.embed(flat), flat))


@torch.inference_mode()
def advance(
    decoder: Decoder,
    tokens: Tensor,
    partial: PartialPass,
    kv_cache: KVCacheScheme = UNCOMPRESSED,
    state_dtype: str = STATE_FLOAT32,
) -> None:
    """Computes the next layer of a pass over windows `[B, T]`, the only one that `decoder` needs to have; see
    `runtime.model.scoring.hidden_states`."""
    length = tokens.shape[1]
    decoder = decoder if length <= decoder.config.default_length else decoder.for_length(length)
    attention = whole_attention(decoder, length, kv_cache)
    attention.chosen.put(*partial.chosen)
    positions, states = whole_rows(decoder, tokens, state_dtype)
    decoder.advance([partial.num_layers], partial.passing, positions, attention, states)
    partial.chosen = attention.chosen.layer, attention.chosen.parts
    partial.num_layers += 1

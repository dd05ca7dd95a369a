"""Heads of multi-token prediction as they are served: with the model whose embedding and output head they use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.expert_files import split_stacks
from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import ToolkitError
from compress.models.mtp import MultiTokenPrediction
from runtime.backends.base import Attention, Linear, NormWeights, RunLayers, Target
from runtime.model.decoder import Decoder
from runtime.model.device_files import reader_for
from runtime.model.expected_tensors import check_tensors
from runtime.model.loader import load_layers
from runtime.model.rotary import Rotary
from runtime.model.weight_reader import WeightReader

REMEDY = "Use --speculative-model ngram, or a checkpoint with its head of multi-token prediction"


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A head of multi-token prediction, see `compress.models.mtp.MultiTokenPrediction`.

    Attributes:
        decoder: a model of one layer, the head's block, with the norm of the head and the ends of the target.
    """

    spec: MultiTokenPrediction
    decoder: Decoder
    embedding_norm: NormWeights
    hidden_norm: NormWeights
    projection: Linear

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        attention: Attention,
        run_layers: RunLayers | None = None,
    ) -> Tensor:
        """Computes states `[T, H]`, of which `decoder.logits` predicts the tokens after `token_ids`.

        Args:
            token_ids: int64 `[T]`, the tokens after those at int64 `positions [T]`.
            hidden: `[T, H]` at the positions: final hidden states of the target, or what `feedback` returns.
            attention, run_layers: as of `Decoder.forward`.
        """
        ops = self.decoder.ops
        embedded = ops.normalize(self.decoder.embed(token_ids), self.embedding_norm)
        both = torch.cat((embedded, ops.normalize(hidden, self.hidden_norm)), -1)
        return self.decoder.run_blocks(self.projection(both), token_ids, positions, attention, run_layers)

    def feedback(self, states: Tensor) -> Tensor:
        """Returns what the head reads as `hidden` one position later, `[T, H]`, of what `forward` returned."""
        return self.decoder.final_norm(states) if self.spec.feeds_normed else states

    @property
    def nbytes(self) -> int:
        """Memory of its own weights."""
        return self.projection.nbytes + sum(layer.nbytes for layer in self.decoder.layers)


def find_head(checkpoint: PackedCheckpoint, spec: MultiTokenPrediction | None) -> MultiTokenPrediction | None:
    """Returns the description of a head whose tensors a checkpoint holds; None without them."""
    module = "" if spec is None else spec.projection.name
    return spec if f"{module}.weight" in checkpoint.files or module in checkpoint.schemes else None


def load_head(path: str | Path, target: Decoder, kernels: str = "auto") -> MtpHead:
    """Loads the head of multi-token prediction of the checkpoint that `target` was loaded from.

    Raises:
        ToolkitError: the family has no such head, or the checkpoint lacks its tensors.
        CheckpointError: tensors of it that are missing or misshapen.
    """
    checkpoint, whole = PackedCheckpoint.open(path), target.config.spec
    spec = find_head(checkpoint, whole.mtp)
    if spec is None:
        where = "this family has" if whole.mtp is None else f"{path} holds"
        raise ToolkitError(f"{where} no head of multi-token prediction", REMEDY)
    config = replace(target.config, spec=spec.model(whole))
    checkpoint = replace(checkpoint, files=split_stacks(checkpoint.files, config.spec.slices()))
    check_tensors(checkpoint, config)
    model = replace(target, config=config)
    layers, description = load_layers(checkpoint, model, kernels)
    place, device_reader = Target(target.device, target.dtype), reader_for(target.device)
    reader = WeightReader(checkpoint, place, kernels, {}, device_reader=device_reader)
    decoder = replace(
        model,
        layers=layers,
        norm=reader.norm(spec.norm),
        rotaries=tuple(Rotary(*rotation, target.dtype, target.device) for rotation in config.spec.rotations),
        description=tuple(description),
    )
    norms = reader.norm(spec.embedding_norm), reader.norm(spec.hidden_norm)
    return MtpHead(spec, decoder, *norms, reader.linear(spec.projection))

"""Lightning attention (arXiv:2401.04658) in plain torch: the oracle of every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.families.minimax import LightningAttention
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.state_memory import StepStates
from runtime.model.mixers.causal_conv import RowGroup
from runtime.model.mixers.group_scan import scan_groups, scan_segments
from runtime.model.mixers.mamba2 import CHUNK, ScanInputs, scan
from runtime.model.mixers.registry import RecurrentMixer, loads
from runtime.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class LightningLayer(RecurrentMixer):
    """Weights of one layer.

    Attributes:
        inputs: query, key and value of each head in turn, followed by the output gate.
        decays: `[heads, 1]` in the dtype of the state.
    """

    spec: LightningAttention
    inputs: Linear
    output: Linear
    decays: Tensor
    norm: NormWeights

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.output.nbytes

    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""
        size = self.spec.num_heads * self.spec.head_dim
        mixed, gate = self.inputs(x).split((3 * size, size), -1)
        rows = ops.activate(mixed.contiguous(), self.spec.activation)
        heads = scan_groups(states, layer, (rows,), self._scan).to(x.dtype)
        return self.output(gate.sigmoid() * ops.normalize(heads, self.norm))

    def _scan(self, group: RowGroup, mixed: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Computes heads `[rows, H * D]` of a group, and matrices after its segments."""
        heads = mixed.to(matrix.dtype).view(group.num_sequences, -1, self.spec.num_heads, 3 * self.spec.head_dim)
        query, key, value = heads.transpose(1, 2).chunk(3, -1)
        inputs = ScanInputs(value, key, query, self.decays.expand(query.shape[:3]))
        found, matrices = scan_segments(group, inputs, matrix, scan, CHUNK)
        return found.transpose(1, 2).flatten(0, 1).flatten(1), matrices


@loads(LightningAttention)
def load_lightning(mixer: LightningAttention, block: WeightReader) -> LightningLayer:
    """Loads one layer of lightning attention."""
    decays = torch.tensor(mixer.decays, dtype=block.wide, device=block.target.device)
    inputs, output = block.linear(*mixer.qkv), block.linear(mixer.output)
    return LightningLayer(mixer, inputs, output, decays.unsqueeze(1), block.norm(mixer.norm))

"""A mixer with a state, as one file: the gated mean of earlier tokens, which a learned decay weights."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from compress.models.cuts import Cuts, stacked
from compress.models.linear import Linear as LinearSpec
from compress.models.mixers.mixer import Mixer, StateField
from runtime.backends.base import Linear, Ops
from runtime.backends.state_memory import StepStates
from runtime.model.mixers.causal_conv import RowGroup
from runtime.model.mixers.group_scan import scan_groups
from runtime.model.mixers.registry import RecurrentMixer, loads
from runtime.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class Mean(Mixer):
    """`output(sigmoid(gate) * mean)` with `mean = decay * mean + value`.

    Attributes:
        qkv: one projection, of value and gate.
    """

    qkv: tuple[LinearSpec, ...]
    output: LinearSpec
    name: str = "self_attn"

    @property
    def size(self) -> int:
        return self.qkv[0].out_features // 2

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.decay_logit": (self.size,)}

    @property
    def state_fields(self) -> dict[str, StateField]:
        return {"mean": StateField((self.size,), is_exact=True)}

    def cut(self, cuts: Cuts) -> Self:
        own = cuts.share(self.size, self.output)
        cuts.vector(f"{self.name}.decay_logit", own)
        qkv = (cuts.rows(self.qkv[0], *stacked((own, self.size), (own, self.size))),)
        return replace(self, qkv=qkv, output=cuts.columns(self.output, own))


@dataclass(frozen=True, slots=True)
class MeanLayer(RecurrentMixer):
    """Weights of one layer."""

    inputs: Linear
    output: Linear
    decay: Tensor

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.output.nbytes

    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        value, gate = self.inputs(x).chunk(2, -1)
        means = scan_groups(states, layer, (value,), self._scan).to(x.dtype)
        return self.output(gate.sigmoid() * means)

    def _scan(self, group: RowGroup, value: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        means = []
        for row in value.unflatten(0, (group.num_sequences, -1)).unbind(1):
            mean = self.decay * mean + row
            means.append(mean)
        found = torch.stack(means, 1)
        return found.flatten(0, 1), found[:, [stop - 1 for stop in group.stops]].flatten(0, 1)


@loads(Mean)
def load_mean(mixer: Mean, block: WeightReader) -> MeanLayer:
    decay = block.vector(f"{mixer.name}.decay_logit", block.wide).sigmoid()
    return MeanLayer(block.linear(*mixer.qkv), block.linear(mixer.output), decay)

"""Kimi delta attention (arXiv:2510.26692) in plain torch: the oracle of every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.families.kimi_linear import KimiDelta
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.state_memory import StepStates
from runtime.model.mixers.causal_conv import RowGroup, convolve
from runtime.model.mixers.gated_delta_net import DeltaInputs, normalized
from runtime.model.mixers.group_scan import scan_groups, scan_segments
from runtime.model.mixers.registry import RecurrentMixer, loads
from runtime.model.weight_reader import WeightReader

CHUNK = 16
"""Tokens that are computed at once: each pair of them takes an exponential of every channel of a key."""


def delta_chunk(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes outputs `[B, H, n, V]` of a few tokens, and the state `[B, H, K, V]` after them.

    No exponent is above 0, so that nothing overflows, however fast channels decay (arXiv:2510.26692, section 3.1).

    Args:
        x: with a decay of each channel, `[B, H, n, K]`.
    """
    total, beta = x.decay.cumsum(-2), x.beta.unsqueeze(-1)
    # What is left of each key at each token, [B, H, n, n, K]; keys that come after a token are cut off below.
    left = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp_(max=0).exp_().mul_(x.key.unsqueeze(-3))
    shared, mixed = (torch.stack((x.key, x.query), -2) @ left.mT).unbind(-2)
    seen, last = total.exp(), total[..., -1:, :]
    update = beta * (x.value - (seen * x.key) @ state)
    if x.beta.shape[-1] > 1:
        update = torch.linalg.solve_triangular((beta * shared).tril(-1), update, upper=False, unitriangular=True)
    output = (seen * x.query) @ state + mixed.tril() @ update
    return output, last.mT.exp() * state + ((last - total).exp() * x.key).mT @ update


@dataclass(frozen=True, slots=True)
class KimiDeltaLayer(RecurrentMixer):
    """Weights of one layer. All but the linears have the dtype of the state.

    Attributes:
        inputs: queries, keys and values, side by side.
        gates: inner channels of decay and output gate, and beta, side by side.
        decay, gate: read these inner channels.
        conv: `[kernel, 3 * channels]`.
        rate: `-exp(A_log) [heads, 1]`.
        dt_bias: `[heads, K]`.
    """

    spec: KimiDelta
    inputs: Linear
    gates: Linear
    decay: Linear
    gate: Linear
    output: Linear
    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: NormWeights

    @property
    def nbytes(self) -> int:
        linears = self.inputs, self.gates, self.decay, self.gate, self.output
        return sum(linear.nbytes for linear in linears) + self.conv.nbytes

    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""
        size = self.spec.head_dim
        inner, gate, beta = self.gates(x).split((size, size, self.spec.num_heads), -1)
        rows = self.inputs(x), self._decays(inner), beta.sigmoid().to(self.rate.dtype)
        heads = scan_groups(states, layer, rows, partial(self._scan, ops)).to(x.dtype)
        normed = functional.rms_norm(heads.to(self.rate.dtype), (size,), self.norm.weight, self.norm.eps)
        gate = self.gate(gate).unflatten(-1, (-1, size)).to(normed.dtype).sigmoid()
        return self.output((normed * gate).to(x.dtype).flatten(1))

    def _decays(self, inner: Tensor) -> Tensor:
        """Computes the logarithm of the decay of each channel, `[T, heads, K]`."""
        step = self.decay(inner).unflatten(-1, (-1, self.spec.head_dim))
        return self.rate * functional.softplus(step.to(self.rate.dtype) + self.dt_bias)

    def _scan(
        self, ops: Ops, group: RowGroup, mixed: Tensor, decay: Tensor, beta: Tensor, window: Tensor, matrix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes heads `[rows, H, V]` of a group, and windows and matrices after its segments."""
        mixed, decay, beta = (part.unflatten(0, (group.num_sequences, -1)) for part in (mixed, decay, beta))
        seen = torch.cat((window, mixed), 1)
        convolved = ops.activate(convolve(seen, self.conv).to(seen.dtype), self.spec.activation)
        heads = convolved.to(beta.dtype).unflatten(-1, (3, -1, self.spec.head_dim)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        query, key = normalized(query) * self.spec.head_dim**-0.5, normalized(key)
        inputs = DeltaInputs(query, key, value, beta.mT, decay.transpose(1, 2))
        found, matrices = scan_segments(group, inputs, matrix, delta_chunk, CHUNK)
        return found.transpose(1, 2).flatten(0, 1), group.windows(seen), matrices


@loads(KimiDelta)
def load_kimi_delta(mixer: KimiDelta, block: WeightReader) -> KimiDeltaLayer:
    """Loads one layer of Kimi delta attention."""
    conv = torch.cat([block.vector(name, block.wide).squeeze(1) for name in mixer.joined_convs])
    return KimiDeltaLayer(
        mixer,
        inputs=block.linear(*mixer.qkv),
        gates=block.linear(*mixer.gates),
        decay=block.linear(mixer.decay),
        gate=block.linear(mixer.gate),
        output=block.linear(mixer.output),
        conv=conv.T.contiguous(),
        rate=-block.vector(mixer.decays, block.wide).exp().view(-1, 1),
        dt_bias=block.vector(f"{mixer.name}.dt_bias", block.wide).view(-1, mixer.head_dim),
        norm=block.norm(mixer.norm),
    )

"""Linear attention by the gated delta rule (arXiv:2412.06464) in plain torch: the oracle of every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.mixers.gated_delta_net import GatedDeltaNet
from runtime.backends.base import Linear, Ops
from runtime.backends.registry import choose_state_steps
from runtime.backends.state_kernels import DeltaWeights, StateSteps
from runtime.backends.state_memory import StepStates
from runtime.model.mixers.causal_conv import RowGroup, convolve
from runtime.model.mixers.group_scan import scan_groups, scan_segments
from runtime.model.mixers.registry import RecurrentMixer, loads
from runtime.model.weight_reader import WeightReader

CHUNK = 64
"""Tokens that are computed at once; more take longer, as the work in a chunk grows with its square."""
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of the delta rule, in the dtype of the state.

    Attributes:
        query, key: `[B, H, n, K]`, normalized.
        value: `[B, H, n, V]`.
        beta: strength of each update, `[B, H, n]`.
        decay: logarithm of the factor on the state before each update, `[B, H, n]`; at most 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor

    def tokens(self, start: int, stop: int) -> DeltaInputs:
        """Those of some tokens."""
        parts = (self.query, self.key, self.value, self.beta, self.decay)
        return DeltaInputs(*(part[:, :, start:stop] for part in parts))


def delta_rule(inputs: DeltaInputs, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Computes outputs `[B, H, n, V]` and the state `[B, H, K, V]` after the last token from that before the first."""
    outputs = []
    for start in range(0, inputs.beta.shape[-1], chunk):
        output, state = _chunk(inputs.tokens(start, start + chunk), state)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), state


def _chunk(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a few tokens at once: their updates solve a triangular system (arXiv:2412.06464, section 3.3)."""
    total = x.decay.cumsum(-1)
    since = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # decay from one token to a later one
    seen = total.unsqueeze(-1).exp()
    beta = x.beta.unsqueeze(-1)
    update = beta * (x.value - seen * (x.key @ state))
    if x.beta.shape[-1] > 1:
        shared = (beta * since * (x.key @ x.key.mT)).tril(-1)
        update = torch.linalg.solve_triangular(shared, update, upper=False, unitriangular=True)
    output = seen * (x.query @ state) + (since * (x.query @ x.key.mT)) @ update
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    return output, total[..., -1:, None].exp() * state + (left * x.key).mT @ update


@dataclass(frozen=True, slots=True)
class DeltaNet(RecurrentMixer):
    """Weights of one layer, and what computes it.

    Attributes:
        inputs: queries, keys, values and output gates, side by side.
        gates: beta and decay, side by side.
        steps: kernels of all between the linears.
    """

    spec: GatedDeltaNet
    inputs: Linear
    gates: Linear
    output: Linear
    weights: DeltaWeights
    steps: StateSteps

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.gates.nbytes + self.output.nbytes + self.weights.conv.nbytes

    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""
        projected, step = (self.inputs(x), self.gates(x)), self.steps.of(states.rows)
        if step is not None:
            return self.output(step(projected, states.tensors[layer], states.rows))
        return self.output(self._compute(*projected, layer, states, ops))

    def _compute(self, inputs: Tensor, gates: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes in plain torch what the output reads, `[T, C]`."""
        mixed, gate = self._split(inputs)
        beta, decay = self._read_gates(gates)
        heads = scan_groups(states, layer, (mixed, beta, decay), partial(self._scan, ops))
        wide = functional.silu(gate.to(self.weights.conv.dtype))
        gated = ops.normalize(heads.to(gate.dtype), self.weights.norm) * wide
        return gated.to(gate.dtype).flatten(1)

    def _scan(
        self, ops: Ops, group: RowGroup, mixed: Tensor, beta: Tensor, decay: Tensor, window: Tensor, matrix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes heads `[rows, H, V]` of a group, and windows and matrices after its segments."""
        mixed, beta, decay = (part.unflatten(0, (group.num_sequences, -1)) for part in (mixed, beta, decay))
        seen = torch.cat((window, mixed), 1)
        convolved = ops.activate(convolve(seen, self.weights.conv).to(seen.dtype), self.spec.activation)
        inputs = self._delta_inputs(convolved, beta.mT, decay.mT)
        found, matrices = scan_segments(group, inputs, matrix, delta_rule, CHUNK)
        return found.transpose(1, 2).flatten(0, 1), group.windows(seen), matrices

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Splits projections into what is convolved, `[T, channels]`, and the output gate `[T, heads, V]`."""
        spec = self.spec
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        if not spec.grouped:
            mixed, gate = projected.split((2 * keys + values, values), -1)
        else:
            shares = [part // spec.num_key_heads for part in (keys, keys, values, values)]
            *parts, gate = projected.unflatten(-1, (spec.num_key_heads, -1)).split(shares, -1)
            mixed = torch.cat([part.flatten(1) for part in parts], -1)
        return mixed, gate.reshape(-1, spec.num_heads, spec.value_dim)

    def _read_gates(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Computes beta and the logarithm of the decay, `[T, heads]` each in the dtype of the state."""
        if self.spec.grouped:
            projected = projected.unflatten(-1, (self.spec.num_key_heads, 2, -1)).transpose(1, 2)
        beta, step = projected.reshape(len(projected), 2, -1).unbind(1)
        decay = self.weights.decay
        step = functional.softplus(step.to(decay.dtype) + self.weights.dt_bias)
        return beta.sigmoid().to(decay.dtype), decay * step

    def _delta_inputs(self, convolved: Tensor, beta: Tensor, decay: Tensor) -> DeltaInputs:
        spec, (batch, count, _) = self.spec, convolved.shape
        keys, shared = spec.num_key_heads * spec.key_dim, spec.num_heads // spec.num_key_heads
        query, key, value = convolved.to(beta.dtype).split((keys, keys, spec.num_heads * spec.value_dim), -1)
        query, key = (normalized(part.unflatten(-1, (-1, spec.key_dim))) for part in (query, key))
        query, key = (part.repeat_interleave(shared, 2).transpose(1, 2) for part in (query, key))
        value = value.view(batch, count, -1, spec.value_dim).transpose(1, 2)
        return DeltaInputs(query * spec.key_dim**-0.5, key, value, beta, decay)


def normalized(heads: Tensor) -> Tensor:
    return heads * (heads.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


@loads(GatedDeltaNet)
def load_delta_net(mixer: GatedDeltaNet, block: WeightReader) -> DeltaNet:
    """Loads one layer of a gated delta net."""
    weights = DeltaWeights(
        conv=block.vector(mixer.conv, block.wide).squeeze(1).T.contiguous(),
        decay=-block.vector(f"{mixer.name}.A_log", block.wide).exp(),
        dt_bias=block.vector(f"{mixer.name}.dt_bias").to(block.wide),
        norm=block.norm(mixer.norm),
    )
    steps = choose_state_steps(mixer, weights, block.target, block.kernels)
    block.used[f"gated delta rule: {steps.reason}"] += 1
    return DeltaNet(
        mixer,
        block.linear(*mixer.qkv),
        block.linear(*mixer.gates),
        block.linear(mixer.output),
        weights,
        steps,
    )

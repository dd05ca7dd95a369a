"""Selective state space models of Mamba-1 (arXiv:2312.00752) in plain torch: the oracle of every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.families.jamba import Mamba1
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.state_memory import StepStates
from runtime.model.mixers.causal_conv import RowGroup, convolve
from runtime.model.mixers.group_scan import scan_groups, scan_segments
from runtime.model.mixers.registry import RecurrentMixer, loads
from runtime.model.weight_reader import WeightReader

CHUNK = 16
"""Tokens that are computed at once: the states after each of them are in memory."""


@dataclass(frozen=True, slots=True)
class SelectiveInputs:
    """Inputs of the scan, in the dtype of the state: B sequences of n tokens.

    Attributes:
        value, step: `[B, n, C]`.
        write, read: what goes into the state and comes out of it, `[B, n, N]`.
    """

    value: Tensor
    step: Tensor
    write: Tensor
    read: Tensor

    def tokens(self, start: int, stop: int) -> SelectiveInputs:
        """Those of some tokens."""
        return SelectiveInputs(*(part[:, start:stop] for part in (self.value, self.step, self.write, self.read)))


def selective_chunk(rate: Tensor, x: SelectiveInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes outputs `[B, n, C]` of a few tokens, and the state `[B, C, N]` after them.

    States are sums over 1, 2, 4 and more tokens in turn (Hillis and Steele, 1986, Data Parallel Algorithms).

    Args:
        rate: `[C, N]`, below 0.
    """
    decay = (x.step.unsqueeze(-1) * rate).exp()
    states = (x.step * x.value).unsqueeze(-1) * x.write.unsqueeze(-2)
    states[:, 0] += decay[:, 0] * state
    shift = 1
    while shift < states.shape[1]:
        states[:, shift:] += decay[:, shift:] * states[:, :-shift]
        decay[:, shift:] *= decay[:, :-shift].clone()
        shift *= 2
    return (states @ x.read.unsqueeze(-1)).squeeze(-1), states[:, -1]


@dataclass(frozen=True, slots=True)
class Mamba1Layer(RecurrentMixer):
    """Weights of one layer. All but linears and norms have the dtype of the state.

    Attributes:
        inputs: what is convolved, and gates, side by side.
        select, step: see `Mamba1`.
        conv: `[kernel, channels]`.
        conv_bias: `[channels]`.
        rate: `-exp(A_log) [channels, N]`.
        skip: share of its input that is added to the output of a channel, `[channels]`.
    """

    spec: Mamba1
    inputs: Linear
    select: Linear
    step: Linear
    output: Linear
    conv: Tensor
    conv_bias: Tensor | None
    rate: Tensor
    skip: Tensor
    norms: tuple[NormWeights, ...]

    @property
    def nbytes(self) -> int:
        linears = self.inputs, self.select, self.step, self.output
        return sum(linear.nbytes for linear in linears) + self.conv.nbytes + self.rate.nbytes

    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""
        mixed, gate = self.inputs(x).chunk(2, -1)
        found = scan_groups(states, layer, (mixed,), partial(self._scan, ops))
        return self.output((found * functional.silu(gate.to(found.dtype))).to(x.dtype))

    def _scan(self, ops: Ops, group: RowGroup, mixed: Tensor, window: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        """Computes channels `[rows, C]` of a group, and windows and matrices after its segments."""
        seen = torch.cat((window, mixed.unflatten(0, (group.num_sequences, -1))), 1)
        convolved = convolve(seen, self.conv)
        convolved = convolved if self.conv_bias is None else convolved + self.conv_bias
        convolved = ops.activate(convolved.to(seen.dtype), self.spec.activation)
        inputs = self._scan_inputs(convolved, ops)
        found, matrices = scan_segments(group, inputs, matrix, partial(selective_chunk, self.rate), CHUNK)
        return (found + self.skip * inputs.value).flatten(0, 1), group.windows(seen), matrices

    def _scan_inputs(self, convolved: Tensor, ops: Ops) -> SelectiveInputs:
        sizes = [norm.size for norm in self.spec.norms]
        parts = self.select(convolved.flatten(0, 1)).split(sizes, -1)
        step, *parts = (ops.normalize(part.contiguous(), norm) for part, norm in zip(parts, self.norms, strict=True))
        wide = [part.to(self.rate.dtype).unflatten(0, convolved.shape[:2]) for part in (self.step(step), *parts)]
        return SelectiveInputs(convolved.to(self.rate.dtype), functional.softplus(wide[0]), *wide[1:])


@loads(Mamba1)
def load_mamba1(mixer: Mamba1, block: WeightReader) -> Mamba1Layer:
    """Loads one layer of Mamba-1."""
    return Mamba1Layer(
        mixer,
        inputs=block.linear(*mixer.qkv),
        select=block.summed(mixer.select),
        step=block.linear(mixer.step),
        output=block.linear(mixer.output),
        conv=block.vector(mixer.conv, block.wide).squeeze(1).T.contiguous(),
        conv_bias=block.vector(mixer.bias, block.wide) if mixer.bias else None,
        rate=-block.vector(f"{mixer.name}.A_log", block.wide).exp(),
        skip=block.vector(f"{mixer.name}.D", block.wide),
        norms=tuple(block.norm(norm) for norm in mixer.norms),
    )

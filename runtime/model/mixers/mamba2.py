"""Selective state space models of Mamba-2 (arXiv:2405.21060) in plain torch: the oracle of every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.mixers.mamba2 import HEAD_VECTORS, Mamba2
from runtime.backends.base import Linear, NormWeights, Ops
from runtime.backends.registry import choose_state_steps
from runtime.backends.state_kernels import Mamba2Weights, StateSteps
from runtime.backends.state_memory import StepStates
from runtime.model.mixers.causal_conv import RowGroup, convolve
from runtime.model.mixers.group_scan import scan_groups, scan_segments
from runtime.model.mixers.registry import RecurrentMixer, loads
from runtime.model.weight_reader import WeightReader

CHUNK = 64
"""Tokens that are computed at once; more take longer, as the work in a chunk grows with its square."""


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """Inputs of the scan, in the dtype of the state: B sequences of n tokens, with G groups of R heads.

    Attributes:
        heads: `[B, G, R, n, P]`, multiplied by their steps.
        write, read: what goes into the state and comes out of it, `[B, G, 1, n, N]`.
        decay: logarithm of the factor on the state before each update, `[B, G, R, n]`; at most 0.
    """

    heads: Tensor
    write: Tensor
    read: Tensor
    decay: Tensor

    def tokens(self, start: int, stop: int) -> ScanInputs:
        """Those of some tokens."""
        heads, write, read = (part[..., start:stop, :] for part in (self.heads, self.write, self.read))
        return ScanInputs(heads, write, read, self.decay[..., start:stop])


def scan(inputs: ScanInputs, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Computes outputs `[B, G, R, n, P]` and the state `[B, G, R, N, P]` after the last token from that before the
    first."""
    outputs = []
    for start in range(0, inputs.decay.shape[-1], chunk):
        output, state = _chunk(inputs.tokens(start, start + chunk), state)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2), state


def _chunk(x: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a few tokens at once, as masked attention among themselves (arXiv:2405.21060, section 6)."""
    total = x.decay.cumsum(-1)
    since = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # decay from one token to a later one
    seen, last = total.unsqueeze(-1).exp(), total[..., -1:]
    output = seen * (x.read @ state) + (since * (x.read @ x.write.mT)) @ x.heads
    left = (last - total).exp().unsqueeze(-1)
    return output, last.unsqueeze(-1).exp() * state + x.write.mT @ (left * x.heads)


@dataclass(frozen=True, slots=True)
class Mamba2Layer(RecurrentMixer):
    """Weights of one layer, and what computes it.

    Attributes:
        inputs: gates, what is convolved, and steps, side by side.
        steps: kernels of all between the linears.
        factors: on what `inputs` gives.
    """

    spec: Mamba2
    inputs: Linear
    output: Linear
    weights: Mamba2Weights
    steps: StateSteps
    factors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.output.nbytes + self.weights.conv.nbytes

    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""
        projected, compute = self.inputs(x), self.steps.of(states.rows)
        projected = projected if self.factors is None else projected * self.factors
        if compute is not None:
            return self.output(compute((projected,), states.tensors[layer], states.rows))
        return self.output(self._compute(projected, layer, states, ops))

    def _compute(self, projected: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes in plain torch what the output reads, `[T, C]`."""
        gate, mixed, step = projected.split((self.spec.inner_size, self.spec.conv_size, self.spec.num_heads), -1)
        heads = scan_groups(states, layer, (mixed, self._steps(step)), partial(self._scan, ops))
        return self._gated(heads, gate).to(gate.dtype)

    def _scan(
        self, ops: Ops, group: RowGroup, mixed: Tensor, step: Tensor, window: Tensor, matrix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes heads `[rows, channels]` of a group, and windows and matrices after its segments."""
        mixed, step = (part.unflatten(0, (group.num_sequences, -1)) for part in (mixed, step))
        seen = torch.cat((window, mixed), 1)
        heads, inputs = self._scan_inputs(self._convolve(seen, ops), step)
        found, matrices = scan_segments(group, inputs, matrix.unflatten(1, (self.spec.num_groups, -1)), scan, CHUNK)
        found = found.flatten(1, 2).transpose(1, 2) + self.weights.skip.unsqueeze(-1) * heads
        return found.flatten(0, 1).flatten(1), group.windows(seen), matrices.flatten(1, 2)

    def _convolve(self, seen: Tensor, ops: Ops) -> Tensor:
        convolved, bias = convolve(seen, self.weights.conv), self.weights.conv_bias
        convolved = convolved if bias is None else convolved + bias
        return ops.activate(convolved.to(seen.dtype), self.spec.activation)

    def _steps(self, projected: Tensor) -> Tensor:
        """Computes the steps `[T, heads]` in the dtype of the state."""
        bias = self.weights.dt_bias
        return functional.softplus(projected.to(bias.dtype) + bias).clamp(*self.spec.step_limits)

    def _scan_inputs(self, convolved: Tensor, step: Tensor) -> tuple[Tensor, ScanInputs]:
        """Splits `[B, n, channels]`; also returns the heads `[B, n, heads, P]` as they are."""
        spec = self.spec
        heads, write, read = convolved.to(step.dtype).split(spec.sizes[1:4], -1)
        heads = heads.unflatten(-1, (spec.num_heads, -1))
        write, read = (part.unflatten(-1, (spec.num_groups, 1, -1)).movedim(1, 3) for part in (write, read))
        scaled, decay = (
            part.unflatten(2, (spec.num_groups, -1)).movedim(1, 3)
            for part in (heads * step.unsqueeze(-1), self.weights.decay * step)
        )
        return heads, ScanInputs(scaled, write, read, decay)

    def _gated(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Applies the gate and the norm to `[T, channels]`."""
        gate, norm = functional.silu(gate.to(heads.dtype)), self.weights.norm
        if norm is None:
            return heads * gate
        if self.spec.norms_before_gate:
            return self._normalized(heads, norm) * gate
        return self._normalized(heads * gate, norm)

    def _normalized(self, heads: Tensor, norm: NormWeights) -> Tensor:
        """Applies the norm to each group of heads, `[T, channels]`."""
        heads = heads.unflatten(-1, (self.spec.num_groups, -1))
        if norm.squares is None:
            return functional.rms_norm(heads, heads.shape[-1:], None, norm.eps).flatten(1) * norm.weight
        return (heads * (norm.squares(heads) + norm.eps).rsqrt()).flatten(1) * norm.weight


@loads(Mamba2)
def load_mamba2(mixer: Mamba2, block: WeightReader) -> Mamba2Layer:
    """Loads one layer of Mamba-2."""
    decay, skip, dt_bias = (block.vector(f"{mixer.name}.{part}", block.wide) for part in HEAD_VECTORS)
    weights = Mamba2Weights(
        conv=block.vector(mixer.conv, block.wide).squeeze(1).T.contiguous(),
        conv_bias=block.vector(mixer.bias, block.wide) if mixer.bias else None,
        decay=-decay.exp(),
        dt_bias=dt_bias,
        skip=skip,
        norm=block.optional_norm(mixer.norm),
    )
    if mixer.norm is None or mixer.norm.share is None:
        steps = choose_state_steps(mixer, weights, block.target, block.kernels)
    else:
        steps = StateSteps(reason="ranks share its norm, plain torch")
    block.used[f"Mamba-2: {steps.reason}"] += 1
    inputs, output = block.linear(*mixer.qkv), block.linear(mixer.output)
    return Mamba2Layer(mixer, inputs, output, weights, steps, _factors(mixer, block))


def _factors(mixer: Mamba2, block: WeightReader) -> Tensor | None:
    if not mixer.factors:
        return None
    parts = [torch.full((size,), factor) for size, factor in zip(mixer.sizes, mixer.factors, strict=True)]
    return torch.cat(parts).to(block.target.device, block.target.dtype)

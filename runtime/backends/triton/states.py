"""Mixers with a state on NVIDIA GPUs through Triton, which is imported when the first layer is prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from runtime.backends.base import NormWeights, Target
from runtime.backends.state_kernels import DeltaWeights, Mamba2Weights, StateKernel
from runtime.backends.triton.device import unsupported_reason
from runtime.core.state_rows import StateRows

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.causal_conv import ConvColumns, GateColumns
    from runtime.backends.triton.kernels.state_scan import Heads, HeadVectors

CHANNELS = (16, 32, 64, 128, 256)
"""Channels of a key, or numbers of a state, and channels of a value."""
MOST_TAPS = 8
"""Tokens that a convolution may see."""


@dataclass(frozen=True, slots=True)
class TritonStateStep:
    """See `StateStep`. Launches: convolution; scan; norm and gate. Spans copy the windows first, and those of the delta
    rule solve the systems of their chunks; sequences with few rows and with many are scanned by a launch each.

    Attributes:
        conv, conv_bias: float32 `[kernel, channels]` and `[channels]`.
        groups: of heads that are normalized together.
        is_wide: what is normalized is float32, not in the dtype of activations.
        gates_first: the gate comes before the norm.
    """

    heads: Heads
    vectors: HeadVectors
    conv: Tensor
    conv_bias: Tensor | None
    conv_columns: ConvColumns
    gate_columns: GateColumns
    norm: NormWeights | None
    groups: int
    is_wide: bool
    gates_first: bool

    def __call__(self, projected: Sequence[Tensor], states: Mapping[str, Tensor], rows: StateRows) -> Tensor:
        from runtime.backends.triton.kernels.causal_conv import convolve_rows, gate_heads
        from runtime.backends.triton.kernels.state_scan import scan_rows

        inputs, steps, heads = projected[0], projected[-1], self.heads
        convolved = convolve_rows(inputs, self.conv_columns, self.conv, self.conv_bias, states["window"], rows)
        dtype = torch.float32 if self.is_wide else inputs.dtype
        found = torch.empty(len(inputs), heads.num_heads, heads.value_dim, dtype=dtype, device=inputs.device)
        scan_rows(heads, self.vectors, convolved, steps, states["matrix"], rows, found)
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        found = found.view(len(found), self.groups, -1)
        return gate_heads(found, inputs, self.gate_columns, weight, eps, self.gates_first)


def prepare_delta(mixer: GatedDeltaNet, weights: DeltaWeights, target: Target) -> TritonStateStep:
    """Prepares a gated delta net."""
    from runtime.backends.triton.kernels.causal_conv import ConvColumns, GateColumns
    from runtime.backends.triton.kernels.state_scan import Heads, HeadVectors

    shared, key_dim, value_dim = mixer.num_heads // mixer.num_key_heads, mixer.key_dim, mixer.value_dim
    keys, values = mixer.num_key_heads * key_dim, shared * value_dim
    conv, gate = ConvColumns(), GateColumns(mixer.conv_size, mixer.num_heads, 0)
    if mixer.grouped:
        share = 2 * (key_dim + values)
        conv = ConvColumns(0, share, key_dim, keys, values)
        gate = GateColumns(2 * key_dim + values, shared, share)
    side_by_side = shared if mixer.grouped else mixer.num_heads
    heads = Heads(
        *(mixer.num_heads, shared, key_dim, value_dim, 0, keys, 2 * keys),
        gates_shared=side_by_side,
        scale=key_dim**-0.5,
    )
    vectors, groups = HeadVectors(weights.decay, weights.dt_bias), mixer.num_heads
    return TritonStateStep(heads, vectors, weights.conv, None, conv, gate, weights.norm, groups, False, False)


def prepare_mamba2(mixer: Mamba2, weights: Mamba2Weights, target: Target) -> TritonStateStep:
    """Prepares a layer of Mamba-2."""
    from runtime.backends.triton.kernels.causal_conv import ConvColumns, GateColumns
    from runtime.backends.triton.kernels.state_scan import Heads, HeadVectors

    inner, shared = mixer.inner_size, mixer.num_groups * mixer.state_size
    heads = Heads(
        *(mixer.num_heads, mixer.num_heads // mixer.num_groups, mixer.state_size, mixer.head_dim),
        *(inner + shared, inner, 0, inner + mixer.conv_size),
        limits=mixer.step_limits,
    )
    return TritonStateStep(
        heads,
        HeadVectors(weights.decay, weights.dt_bias, weights.skip),
        weights.conv,
        weights.conv_bias,
        ConvColumns(inner),
        GateColumns(0, mixer.num_groups, 0),
        weights.norm,
        mixer.num_groups,
        True,
        not mixer.norms_before_gate,
    )


def delta_unsupported_reason(mixer: GatedDeltaNet, weights: DeltaWeights, target: Target) -> str:
    """Why Triton cannot compute a gated delta net; "" when it can."""
    if weights.norm.centered or weights.norm.bias is not None:
        return "takes root mean square norms"
    return _unsupported_reason(mixer, (mixer.key_dim, mixer.value_dim), target)


def mamba2_unsupported_reason(mixer: Mamba2, weights: Mamba2Weights, target: Target) -> str:
    """Why Triton cannot compute a layer of Mamba-2; "" when it can."""
    return _unsupported_reason(mixer, (mixer.state_size, mixer.head_dim), target)


def _unsupported_reason(mixer: GatedDeltaNet | Mamba2, channels: tuple[int, int], target: Target) -> str:
    if reason := unsupported_reason(target.device, target.dtype):
        return reason
    if odd := set(channels) - set(CHANNELS):
        return f"takes keys, states and values of {', '.join(map(str, CHANNELS))} channels, not {min(odd)}"
    if mixer.kernel > MOST_TAPS:
        return f"takes convolutions of {MOST_TAPS} tokens at most"
    return "" if mixer.activation in ("silu", "swish") else f"has no {mixer.activation} after the convolution"


SUMMARY = "a few launches for all between the linears"
STATE_KERNELS = (
    StateKernel(GatedDeltaNet, SUMMARY, delta_unsupported_reason, prepare_delta),
    StateKernel(Mamba2, SUMMARY, mamba2_unsupported_reason, prepare_mamba2),
)

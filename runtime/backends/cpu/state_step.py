"""All between the linears of layers with a recurrent state, compiled (`state.h`): gated delta nets and Mamba-2."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.cpu.binding import BEST, absence, function, library, struct_fields
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from runtime.backends.base import NormWeights, Target
from runtime.backends.state_kernels import DeltaWeights, Mamba2Weights
from runtime.core.state_rows import StateRows

LANES = 16
MOST_TAPS, MOST_KEYS = 8, 256
"""As in state.h: tokens that a convolution may see, and channels that keys may have."""
NO_NORM, NORM_BEFORE_GATE, NORM_BEHIND_GATE = range(3)


class _StateLayer(ctypes.Structure):
    """`StateLayer` of state.h."""

    _fields_ = struct_fields(
        "int64 heads shared key_dim value_dim channels kernel query_at key_at value_at norm_size",
        "int32 is_delta is_wide norm_place is_norm_wide",
        "float eps least_step most_step",
        "pointer conv conv_bias decay dt_bias skip norm conv_at gate_at beta_at step_at",
    )


class _StateStep(ctypes.Structure):
    """`StateStep` of state.h."""

    _fields_ = struct_fields(
        "pointer layer",
        "int64 sequences rows",
        "pointer reads writes row_starts segment_starts first_segments projected gates",
        "int64 projected_stride gates_stride",
        "pointer windows matrices convolved found out",
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a layer are in projected rows, int32.

    Attributes:
        conv, gate: of each sixteen channels of the convolution and of the heads.
        beta, step: of each head; no beta for Mamba-2.
    """

    conv: Tensor
    gate: Tensor
    beta: Tensor | None
    step: Tensor


class CpuStateStep:
    """See `runtime.backends.state_kernels.StateStep`. Activations are bfloat16 or float32.

    Args:
        layer: with all numbers set.
        tensors: that the layer needs, by its field's name; float32 or int32.
    """

    def __init__(self, layer: _StateLayer, tensors: Mapping[str, Tensor | None], instruction_set: int = BEST) -> None:
        self._step, self._instruction_set = function("state_step", c_void_p, c_int), instruction_set
        self._layer, self._tensors = layer, {name: t.contiguous() for name, t in tensors.items() if t is not None}
        for name, tensor in self._tensors.items():
            setattr(layer, name, tensor.data_ptr())
        self._width = layer.heads * layer.value_dim

    def __call__(self, projected: Sequence[Tensor], states: Mapping[str, Tensor], rows: StateRows) -> Tensor:
        inputs, gates = projected[0].contiguous(), projected[-1].contiguous()
        count, width, channels = len(inputs), self._width, self._layer.channels
        scratch = torch.empty(count, width + channels, dtype=torch.float32)
        out = inputs.new_empty(count, width)
        parts = (rows.read_slots, rows.write_slots, rows.row_starts, rows.segment_starts, rows.first_segments)
        job = _StateStep(
            ctypes.addressof(self._layer),
            *(len(rows.counts), count, *(part.data_ptr() for part in parts)),
            *(inputs.data_ptr(), gates.data_ptr(), inputs.shape[1], gates.shape[1]),
            *(states["window"].data_ptr(), states["matrix"].data_ptr()),
            *(scratch.data_ptr(), scratch.data_ptr() + 4 * count * channels, out.data_ptr()),
        )
        if self._step(ctypes.addressof(job), self._instruction_set):
            raise ValueError(f"this machine lacks instruction set {self._instruction_set}")
        return out


def prepare_delta(
    mixer: GatedDeltaNet, weights: DeltaWeights, target: Target, instruction_set: int = BEST
) -> CpuStateStep:
    """Prepares a gated delta net."""
    keys, places = mixer.num_key_heads * mixer.key_dim, delta_places(mixer)
    norm = weights.norm
    layer = _StateLayer(
        *(mixer.num_heads, mixer.num_heads // mixer.num_key_heads, mixer.key_dim, mixer.value_dim),
        *(mixer.conv_size, mixer.kernel, 0, keys, 2 * keys, mixer.value_dim),
        *(True, target.dtype == torch.float32, NORM_BEFORE_GATE, norm.weight.dtype == torch.float32),
        eps=norm.eps,
    )
    return CpuStateStep(layer, _tensors(weights, norm, places), instruction_set)


def prepare_mamba2(mixer: Mamba2, weights: Mamba2Weights, target: Target, instruction_set: int = BEST) -> CpuStateStep:
    """Prepares a layer of Mamba-2."""
    inner, shared = mixer.inner_size, mixer.num_groups * mixer.state_size
    norm, behind = weights.norm, NORM_BEFORE_GATE if mixer.norms_before_gate else NORM_BEHIND_GATE
    layer = _StateLayer(
        *(mixer.num_heads, mixer.num_heads // mixer.num_groups, mixer.state_size, mixer.head_dim),
        *(mixer.conv_size, mixer.kernel, inner + shared, inner, 0, inner // mixer.num_groups),
        *(False, target.dtype == torch.float32, NO_NORM if norm is None else behind, True),
        *(0.0 if norm is None else norm.eps, *mixer.step_limits),
    )
    at = torch.arange(inner + mixer.conv_size + mixer.num_heads, dtype=torch.int32)
    gate, conv, step = at.split((inner, mixer.conv_size, mixer.num_heads))
    tensors = _tensors(weights, norm, Places(conv[::LANES], gate[::LANES], None, step))
    return CpuStateStep(layer, tensors | {"conv_bias": weights.conv_bias, "skip": weights.skip}, instruction_set)


def delta_places(mixer: GatedDeltaNet) -> Places:
    """Finds where the parts of a gated delta net are."""
    keys, values = mixer.num_key_heads * mixer.key_dim, mixer.num_heads * mixer.value_dim
    projected = torch.arange(2 * (keys + values), dtype=torch.int32)
    gates = torch.arange(2 * mixer.num_heads, dtype=torch.int32)
    if not mixer.grouped:
        conv, gate = projected.split((2 * keys + values, values))
        return Places(conv[::LANES], gate[::LANES], *gates.chunk(2))
    shares = [part // mixer.num_key_heads for part in (keys, keys, values, values)]
    *parts, gate = projected.unflatten(0, (mixer.num_key_heads, -1)).split(shares, 1)
    beta, step = gates.view(mixer.num_key_heads, 2, -1).unbind(1)
    conv = torch.cat([part.flatten() for part in parts])
    return Places(conv[::LANES], gate.flatten()[::LANES], beta.flatten(), step.flatten())


def _tensors(
    weights: DeltaWeights | Mamba2Weights, norm: NormWeights | None, places: Places
) -> dict[str, Tensor | None]:
    return {
        "conv": weights.conv,
        "decay": weights.decay,
        "dt_bias": weights.dt_bias,
        "norm": None if norm is None else norm.weight.float(),
        "conv_at": places.conv,
        "gate_at": places.gate,
        "beta_at": places.beta,
        "step_at": places.step,
    }


def delta_unsupported_reason(mixer: GatedDeltaNet, weights: DeltaWeights, target: Target) -> str:
    """Why compiled code cannot compute a layer; empty when it can."""
    if reason := _unsupported_reason(mixer, mixer.key_dim, mixer.value_dim, target):
        return reason
    if weights.norm.centered or weights.norm.bias is not None:
        return "takes root mean square norms"
    return f"takes keys of a multiple of {LANES} channels" if mixer.grouped and mixer.key_dim % LANES else ""


def mamba2_unsupported_reason(mixer: Mamba2, weights: Mamba2Weights, target: Target) -> str:
    """Why compiled code cannot compute a layer; empty when it can."""
    return _unsupported_reason(mixer, mixer.state_size, mixer.head_dim, target)


def _unsupported_reason(mixer: GatedDeltaNet | Mamba2, keys: int, values: int, target: Target) -> str:
    if target.device.type != "cpu":
        return f"runs on CPUs, not on {target.device.type}"
    if target.dtype not in (torch.bfloat16, torch.float32):
        return "computes in bfloat16 or float32"
    if library() is None:
        return absence()
    if values % LANES or mixer.conv_size % LANES:
        return f"takes heads, and channels of the convolution, of a multiple of {LANES} channels"
    if keys > MOST_KEYS or mixer.kernel > MOST_TAPS:
        return f"takes keys of {MOST_KEYS} channels and convolutions of {MOST_TAPS} tokens at most"
    return "" if mixer.activation in ("silu", "swish") else f"has no {mixer.activation} after the convolution"

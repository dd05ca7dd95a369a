"""One token of every sequence in a layer of the gated delta rule, compiled (`delta_step.h`)."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from compress.cpu.binding import BEST, absence, function, library
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from runtime.backends.base import Target
from runtime.core.state_rows import StateRows

LANES = 16


class _DeltaStep(ctypes.Structure):
    """`DeltaStep` of delta_step.h."""

    _fields_ = (
        *((name, c_int64) for name in ("sequences", "heads", "key_dim", "value_dim")),
        *((name, c_void_p) for name in ("states", "reads", "writes", "query", "key", "value")),
        *((name, c_void_p) for name in ("beta", "factor", "out")),
    )


class CpuDeltaStep:
    """See `runtime.backends.base.DeltaStep`. All tensors are float32 on the CPU."""

    def __init__(self, instruction_set: int = BEST) -> None:
        self._step, self._instruction_set = function("delta_step", c_void_p, c_int), instruction_set

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, states: Tensor, rows: StateRows
    ) -> Tensor:
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        inputs = [part.contiguous() for part in (query, key, value, beta, decay.exp())]
        slots = [part.contiguous() for part in (rows.read_slots, rows.write_slots)]
        sizes = (*query.shape, value.shape[-1])
        job = _DeltaStep(*sizes, *(each.data_ptr() for each in (states, *slots, *inputs, out)))
        if self._step(ctypes.addressof(job), self._instruction_set):
            raise ValueError(f"this machine lacks instruction set {self._instruction_set}")
        return out


def delta_unsupported_reason(mixer: GatedDeltaNet, target: Target) -> str:
    """Why compiled code cannot compute a layer; empty when it can."""
    if target.device.type != "cpu":
        return f"runs on CPUs, not on {target.device.type}"
    if target.dtype == torch.float64:
        return "keeps states in float32"
    if library() is None:
        return absence()
    return f"takes value heads of a multiple of {LANES} channels" if mixer.value_dim % LANES else ""

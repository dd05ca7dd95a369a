"""A decoder's ops in compiled code (`glue.h`), for bfloat16 on CPUs: one pass over each row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from compress.cpu.binding import BEST, absence, library
from runtime.backends.cpu.kv_pages import LONGEST_HEAD, token_stride
from runtime.backends.torch.ops import Ops, TorchOps
from runtime.backends.triton.device import refuse_triton
from runtime.backends.triton.ops import TritonOps
from runtime.core.model_config import DecoderConfig


class _AddNorm(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        ("size", c_int64),
        ("hidden", c_void_p),
        ("update", c_void_p),
        ("weight", c_void_p),
        ("eps", c_float),
        ("out", c_void_p),
    )


class _Rotate(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("x", c_void_p),
        ("stride", c_int64),
        ("weight", c_void_p),
        ("eps", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class _SiluMultiply(ctypes.Structure):
    _fields_ = (("rows", c_int64), ("size", c_int64), ("gate_up", c_void_p), ("out", c_void_p))


def refuse_ops(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why compiled code cannot compute a model's ops; empty when it can."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"takes bfloat16 on CPUs, not {str(dtype).removeprefix('torch.')} on {device.type}"
    if library() is None:
        return absence()
    if config.hidden_size % 16 or config.intermediate_size % 16:
        return f"takes sizes that 16 divides, not {config.hidden_size} and {config.intermediate_size}"
    if config.head_dim % 32 or config.head_dim > LONGEST_HEAD:
        return f"takes heads of 32, 64, ... {LONGEST_HEAD} dimensions, not {config.head_dim}"
    return ""


def choose_ops(config: DecoderConfig, dtype: torch.dtype, device: torch.device, kernels: str) -> tuple[Ops, str]:
    """The fastest ops that may be used, and why; `kernels` is `reference` for plain torch."""
    if kernels != "reference" and not refuse_triton(device, dtype):
        return TritonOps(), "one launch for each step over rows"
    refusal = "reference kernels are plain torch" if kernels == "reference" else refuse_ops(config, dtype, device)
    return (TorchOps(), refusal) if refusal else (NativeOps(), "one pass over each row")


class NativeOps:
    """See `Ops`. All tensors are bfloat16 on the CPU.

    Raises:
        ValueError: there is no library; by every method, an instruction set that this machine lacks.
    """

    def __init__(self, instruction_set: int = BEST) -> None:
        native = library()
        if native is None:
            raise ValueError("there is no native library")
        self._functions = (native.add_norm, native.rotate, native.silu_multiply)
        for function in self._functions:
            function.argtypes, function.restype = (c_void_p, c_int), c_int
        self._instruction_set = instruction_set

    def add_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(hidden)
        update_at = None if update is None else update.contiguous().data_ptr()
        rows, size = hidden.shape
        job = _AddNorm(rows, size, hidden.data_ptr(), update_at, weight.data_ptr(), eps, out.data_ptr())
        self._run(self._functions[0], job)
        return out

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        weight_at = None if weight is None else weight.data_ptr()
        where = heads.data_ptr(), token_stride(heads), weight_at, eps, cos.data_ptr(), sin.data_ptr()
        self._run(self._functions[1], _Rotate(*heads.shape, *where))
        return heads

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        gate_up = gate_up.contiguous()
        self._run(self._functions[2], _SiluMultiply(rows, width // 2, gate_up.data_ptr(), out.data_ptr()))
        return out

    def _run(self, function: Callable[[int, int], int], job: ctypes.Structure) -> None:
        if function(ctypes.addressof(job), self._instruction_set):
            raise ValueError(f"this machine lacks instruction set {self._instruction_set}")

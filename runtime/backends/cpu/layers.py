"""All layers of a decoder in one call of compiled code (`layers.h`): no Python stands between their products."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from compress.common.errors import ToolkitError
from compress.cpu.binding import BEST, absence, library
from compress.cpu.linear import CpuLinear
from compress.models.spec import Block
from runtime.backends.base import LayerWeights, Linear, Model, Target
from runtime.backends.cpu.attention import CpuAttention, PagedAttentionCall
from runtime.backends.cpu.kv_pages import LONGEST_HEAD, CpuPages, token_stride
from runtime.core.memory_plan import MemoryPlan
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


def ops_unsupported_reason(config: DecoderConfig, target: Target) -> str:
    """Why compiled code cannot compute a model's ops; empty when it can."""
    device, dtype = target.device, target.dtype
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"takes bfloat16 on CPUs, not {str(dtype).removeprefix('torch.')} on {device.type}"
    if library() is None:
        return absence()
    if config.hidden_size % 16 or config.intermediate_size % 16:
        return f"takes sizes that 16 divides, not {config.hidden_size} and {config.intermediate_size}"
    if config.head_dim % 32 or config.head_dim > LONGEST_HEAD:
        return f"takes heads of 32, 64, ... {LONGEST_HEAD} dimensions, not {config.head_dim}"
    return ""


class CpuOps:
    """See `Ops`. All tensors are bfloat16 on the CPU.

    Raises:
        ValueError: there is no library; by every method, an instruction set that this machine lacks.
    """

    def __init__(self, instruction_set: int = BEST) -> None:
        native = library()
        if native is None:
            raise ValueError("there is no compiled library")
        self._functions = (native.add_rms_norm, native.rotate, native.silu_and_mul)
        for function in self._functions:
            function.argtypes, function.restype = (c_void_p, c_int), c_int
        self._instruction_set = instruction_set

    def add_rms_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
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

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        gate_up = gate_up.contiguous()
        self._run(self._functions[2], _SiluMultiply(rows, width // 2, gate_up.data_ptr(), out.data_ptr()))
        return out

    def _run(self, function: Callable[[int, int], int], job: ctypes.Structure) -> None:
        if function(ctypes.addressof(job), self._instruction_set):
            raise ValueError(f"this machine lacks instruction set {self._instruction_set}")


class _Product(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("activations", c_int64))


class _DecoderLayer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, _Product) for name in ("qkv", "output", "gate_up", "down")),
        ("pages", c_void_p),
        ("window", c_int64),
    )


class _LayersStep(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        ("eps", c_float),
        ("hadamard", c_int32),
        *((name, c_void_p) for name in ("hidden", "update", "cos", "sin", "slots")),
        ("attention", PagedAttentionCall),
    )


class CpuLayers:
    """The layers of a decoder over its own pages: the same bits as when its functions are called one by one.

    Args:
        windows: sliding window of every layer; None is none.
    """

    def __init__(
        self, decoder: Model, pages: CpuPages, windows: tuple[int | None, ...], instruction_set: int = BEST
    ) -> None:
        native = library()
        if native is None:
            raise ValueError("there is no compiled library")
        self._run = native.decoder_layers
        self._run.argtypes, self._run.restype = (c_void_p, c_int64, c_void_p, c_int), c_int
        self._instruction_set = instruction_set
        self._kept = decoder.layers, pages  # their memory is what the structures point at
        self._eps = decoder.config.norm_eps
        layers = zip(decoder.layers, pages.addresses, windows, strict=True)
        filled = [_layer(layer, ctypes.addressof(address), window) for layer, address, window in layers]
        self._layers = (_DecoderLayer * len(filled))(*filled)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: CpuAttention) -> Tensor:
        """Hidden states `[T, H]` after all layers, in the memory of `hidden`; cosine and sine as for `Ops.rotate`.

        Raises:
            ToolkitError: no memory, or not the instruction set that was asked for.
        """
        update = torch.empty_like(hidden)
        step = _LayersStep(
            rows=len(hidden),
            eps=self._eps,
            hadamard=attention.hadamard,
            hidden=hidden.data_ptr(),
            update=update.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=attention.batch.slots.data_ptr(),
            attention=attention.call,
        )
        if self._run(self._layers, len(self._layers), ctypes.addressof(step), self._instruction_set):
            reason = "this machine lacks the instruction set, or there is no memory"
            raise ToolkitError(f"the compiled layers failed: {reason}", "Use --linear-backend reference")
        return hidden.add_(update)


def block_unsupported_reason(block: Block) -> str:
    """Says why a block cannot be computed here; empty when it can."""
    return "" if block.mlp.activation in ("silu", "swish") else f"computes silu, not {block.mlp.activation}"


def layers_unsupported_reason(decoder: Model, memory: MemoryPlan) -> str:
    """Why a decoder's layers cannot run in one call; empty when they can."""
    if reason := block_unsupported_reason(decoder.config.spec.blocks[0]):
        return reason
    if not isinstance(decoder.ops, CpuOps):
        return "ops between linears are not compiled"
    others = {type(linear).__name__ for layer in decoder.layers for linear in _linears(layer)} - {CpuLinear.__name__}
    return f"takes linears in C only, not {', '.join(sorted(others))}" if others else ""


def _linears(layer: LayerWeights) -> tuple[Linear, Linear, Linear, Linear]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _layer(layer: LayerWeights, pages: int, window: int | None) -> _DecoderLayer:
    norms = layer.attention_norm, layer.mlp_norm, layer.head_norm
    pointers = [None if norm is None else norm.data_ptr() for norm in norms]
    products = [_product(linear) for linear in _linears(layer)]
    return _DecoderLayer(*pointers, *products, pages, window or 0)


def _product(linear: Linear) -> _Product:
    if not isinstance(linear, CpuLinear):
        raise ValueError(f"{type(linear).__name__} is no linear in C")
    return _Product(linear.address, linear.activations)

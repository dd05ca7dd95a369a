"""Compiled attention (`attention.h`), ops between linears and whole layers (`layers.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import AUTO
from compress.checkpoint.kv_quant import rotate_heads
from compress.common.errors import ToolkitError
from compress.cpu.binding import BEST, absence, function, library, struct_fields
from compress.models.clamped_gate import ClampedGate
from runtime.backends.backend import AttentionStep
from runtime.backends.base import NormWeights, Target, plain_weight
from runtime.backends.cpu.adapted_linear import CpuAdaptedLinear, adapters_of
from runtime.backends.cpu.attention_call import PagedAttentionCall, ancestors_of, spans_of
from runtime.backends.cpu.kv_pages import CpuPages, heads_unsupported_reason, pages_unsupported_reason, token_stride
from runtime.backends.cpu.latent import CpuLatentAttention, latents_unsupported_reason
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.cpu.mixture import (
    ACTIVATIONS,
    Activation,
    CpuMixture,
    ExpertAddresses,
    Product,
    clamped,
    product,
)
from runtime.backends.fused_layers import indexers_unsupported, latents_unsupported, layers_unsupported
from runtime.backends.kv_pages import ExactPlaces, KVCache
from runtime.backends.model import Layer, Model
from runtime.backends.scores import PLAIN_SCORES, Scores
from runtime.backends.torch.attention import StepKeys
from runtime.backends.torch.ops import TorchOps
from runtime.core.batch import Batch
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig


class CpuAttention:
    """As `PagedAttention`: stores the step's keys and values, then all spans of all sequences attend in one call.

    Args:
        windows: sliding window of every layer; None is none.
        hadamard: keys are stored Hadamard-rotated (`KVCacheScheme.rotate`); then queries are rotated in place, too.
        instruction_set: of the compiled code.
        scores: of the model; its sink logits are float32.

    Attributes:
        call: what one call needs that all layers share.

    Raises:
        ValueError: an instruction set that this machine lacks, when it is called.
    """

    def __init__(
        self,
        pages: CpuPages,
        batch: Batch,
        windows: tuple[int | None, ...],
        hadamard: bool = False,
        instruction_set: int = BEST,
        scores: Scores = PLAIN_SCORES,
    ) -> None:
        self.scores = scores
        self._attend = function("paged_attention", c_void_p, c_int)
        self.hadamard, self.pages, self.batch, self.windows = hadamard, pages, batch, windows
        self.instruction_set = instruction_set
        self._spans = torch.tensor(spans_of(batch.groups), dtype=torch.int64)
        self._blocks = torch.cat([group.blocks for group in batch.groups])
        self._ancestors = ancestors_of(batch.groups)
        self.call = PagedAttentionCall(
            num_spans=len(self._spans),
            spans=self._spans.data_ptr(),
            blocks=self._blocks.data_ptr(),
            ancestors=None if self._ancestors is None else self._ancestors.data_ptr(),
            scale=pages.head_dim**-0.5,
            wide=pages.dtype == torch.float32,
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.pages.sources[layer] == layer:
            queries = query if self.hadamard else None
            self.pages.write(layer, self.batch.slots, key, value, queries, self.instruction_set)
        elif self.hadamard:
            query = rotate_heads(query)
        out = query.new_empty(query.shape)
        call, scores = self.call, self.scores.of(layer)
        call.pages = ctypes.addressof(self.pages.addresses[layer])
        call.heads, call.scale, call.window = query.shape[1], query.shape[2] ** -0.5, self.windows[layer] or 0
        call.chunk, call.softcap = scores.chunk or 0, scores.softcap or 0.0
        call.sink_logits = None if scores.sink_logits is None else scores.sink_logits.data_ptr()
        call.query, call.query_row, call.out = query.data_ptr(), token_stride(query), out.data_ptr()
        if self._attend(ctypes.addressof(call), self.instruction_set):
            raise ValueError(f"this machine lacks instruction set {self.instruction_set}")
        return out


class _AddNorm(ctypes.Structure):
    _fields_ = struct_fields(
        "int64 rows size",
        "pointer hidden update weight",
        "float eps",
        "pointer out wide",
    )


class _Rotate(ctypes.Structure):
    _fields_ = struct_fields(
        "int64 rows heads head_dim",
        "pointer x",
        "int64 stride",
        "pointer weight",
        "float eps",
        "pointer cos sin",
    )


class _ActivateMultiply(ctypes.Structure):
    _fields_ = struct_fields("int64 rows size", "pointer gate_up out", ("activation", Activation))


LANES = 16
"""Numbers that compiled ops take together (`simd.h`)."""


def ops_unsupported_reason(config: DecoderConfig, target: Target) -> str:
    """Why compiled code cannot compute a model's ops; empty when it can."""
    device, dtype = target.device, target.dtype
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"takes bfloat16 on CPUs, not {str(dtype).removeprefix('torch.')} on {device.type}"
    if library() is None:
        return absence()
    if config.spec.hidden_size % LANES or config.intermediate_size % LANES:
        return f"takes sizes that 16 divides, not {config.spec.hidden_size} and {config.intermediate_size}"
    return heads_unsupported_reason(config)


class CpuOps(TorchOps):
    """See `Ops`. All tensors are bfloat16 on the CPU.

    Raises:
        ValueError: the library is not built; by every method, an instruction set that this machine lacks.
    """

    def __init__(self, instruction_set: int = BEST) -> None:
        self._add_norm, self._rotate, self._activate_and_mul = (
            function(name, c_void_p, c_int) for name in ("add_rms_norm", "rotate", "activate_and_mul")
        )
        self._instruction_set = instruction_set

    def add_rms_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(hidden)
        update_at = None if update is None else update.contiguous().data_ptr()
        rows, size = hidden.shape
        job = _AddNorm(rows, size, hidden.data_ptr(), update_at, weight.data_ptr(), eps, out.data_ptr())
        self._run(self._add_norm, job)
        return out

    def normalize(self, hidden: Tensor, norm: NormWeights) -> Tensor:
        size, weight = hidden.shape[-1], norm.weight
        is_wide_rms = weight.dtype == torch.float32 and not norm.centered and norm.bias is None and not norm.squares
        if size % LANES or not is_wide_rms or hidden.dtype != torch.bfloat16:
            return super().normalize(hidden, norm)
        rows = hidden.contiguous()
        out = torch.empty_like(rows)
        job = _AddNorm(rows.numel() // size, size, rows.data_ptr(), None, None, norm.eps, out.data_ptr())
        job.wide = weight.data_ptr()
        self._run(self._add_norm, job)
        return out

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        weight_at = None if weight is None else weight.data_ptr()
        where = heads.data_ptr(), token_stride(heads), weight_at, eps, cos.data_ptr(), sin.data_ptr()
        self._run(self._rotate, _Rotate(*heads.shape, *where))
        return heads

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._activate(gate_up, Activation())

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in ACTIVATIONS or gate_up.shape[-1] % (2 * LANES):
            return super().activate_and_mul(gate_up, activation)
        return self._activate(gate_up, Activation(ACTIVATIONS[activation]))

    def clamp_and_mul(self, gate_up: Tensor, gate: ClampedGate) -> Tensor:
        if gate_up.shape[-1] % (2 * LANES):
            return super().clamp_and_mul(gate_up, gate)
        return self._activate(gate_up, clamped(gate))

    def _activate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        where = gate_up.contiguous()
        job = _ActivateMultiply(rows, width // 2, where.data_ptr(), out.data_ptr(), activation)
        self._run(self._activate_and_mul, job)
        return out

    def _run(self, function: Callable[[int, int], int], job: ctypes.Structure) -> None:
        if function(ctypes.addressof(job), self._instruction_set):
            raise ValueError(f"this machine lacks instruction set {self._instruction_set}")


class _DecoderLayer(ctypes.Structure):
    _fields_ = struct_fields(
        "pointer attention_norm mlp_norm head_norm",
        ("qkv", Product),
        ("output", Product),
        ("mlp", ExpertAddresses),
        "pointer mixture pages",
        "int64 window",
    )


class _LayersStep(ctypes.Structure):
    _fields_ = struct_fields(
        "int64 rows",
        "float eps",
        "int32 hadamard",
        "pointer hidden update cos sin slots adapters",
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
        self._run = function("decoder_layers", c_void_p, c_int64, c_void_p, c_int)
        self._instruction_set = instruction_set
        self._kept = decoder.layers, pages  # their memory is what the structures point at
        self._adapters = adapters_of(linear for layer in decoder.layers for linear in layer.linears)
        self._eps = decoder.config.spec.final_norm.eps
        layers = zip(decoder.layers, pages.addresses, windows, strict=True)
        # A stage has no weights of other layers.
        own = (each for each in layers if each[0].mixer is not None)
        filled = [_layer(layer, ctypes.addressof(address), window) for layer, address, window in own]
        self._layers = (_DecoderLayer * len(filled))(*filled)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: CpuAttention) -> Tensor:
        """Hidden states `[T, H]` after all layers, in the memory of `hidden`; cosine and sine as for `Ops.rotate`.

        Raises:
            ToolkitError: no memory, or not the instruction set that was asked for.
        """
        update = torch.empty_like(hidden)
        slots = None if self._adapters is None else self._adapters.of_rows(len(hidden))
        step = _LayersStep(
            rows=len(hidden),
            eps=self._eps,
            hadamard=attention.hadamard,
            hidden=hidden.data_ptr(),
            update=update.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=attention.batch.slots.data_ptr(),
            adapters=None if slots is None else slots.data_ptr(),
            attention=attention.call,
        )
        if self._run(self._layers, len(self._layers), ctypes.addressof(step), self._instruction_set):
            reason = "this machine lacks the instruction set, or is out of memory"
            raise ToolkitError(f"the compiled layers failed: {reason}", "Use --linear-backend reference")
        return hidden.add_(update)


def layers_unsupported_reason(decoder: Model, memory: MemoryPlan) -> str:
    """Why a decoder's layers cannot run in one call; empty when they can."""
    if reason := layers_unsupported(decoder.config.spec):
        return reason
    if not isinstance(decoder.ops, CpuOps):
        return "ops between linears are not compiled"
    if any(layer.experts is not None and not isinstance(layer.experts.kernel, CpuMixture) for layer in decoder.layers):
        return "computes no mixtures expert by expert"
    linears = [linear for layer in decoder.layers for linear in layer.linears]
    others = {type(each).__name__ for each in linears if not isinstance(each, CpuLinear | CpuAdaptedLinear)}
    return f"takes linears in C only, not {', '.join(sorted(others))}" if others else ""


def _layer(layer: Layer, pages: int, window: int | None) -> _DecoderLayer:
    head_norm = None if layer.attention is None else layer.attention.head_norm
    norms = plain_weight(layer.norm), plain_weight(layer.mlp_norm), head_norm
    pointers = [None if norm is None else norm.data_ptr() for norm in norms]
    qkv, output, *mlp = map(product, layer.linears)
    kernel = None if layer.experts is None else layer.experts.kernel
    mixture = kernel.address if isinstance(kernel, CpuMixture) else None
    return _DecoderLayer(*pointers, qkv, output, ExpertAddresses(*mlp), mixture, pages, window or 0)


def attention_unsupported_reason(model: Model, memory: MemoryPlan) -> str:
    """Why compiled attention cannot serve a model; "" when it can."""
    if memory.attention_window.window is not None and memory.attention_window.sinks:
        return "keeps no sinks of streams"
    if reason := indexers_unsupported(model.config.spec):
        return reason
    if latents_unsupported(model.config.spec):
        return latents_unsupported_reason(model, memory)
    reason = pages_unsupported_reason(model.config, memory.kv_cache, memory.block_size, model.dtype, model.device)
    if reason or model.dtype == torch.float32:
        return reason
    return "" if isinstance(model.ops, CpuOps) else "goes with compiled ops between linears"


def prepare_attention(
    model: Model, cache: KVCache, windows: tuple[int | None, ...], memory: MemoryPlan
) -> AttentionStep:
    """Compiled attention over pages in place."""
    pages, rotate, scores = cache.pages, cache.scheme.rotate, model.scores
    if scores.latents:
        nowhere = ExactPlaces(None, None)
        return lambda batch: CpuLatentAttention(StepKeys(cache, batch, nowhere), windows, scores)
    if not isinstance(pages, CpuPages):
        raise TypeError(f"{type(pages).__name__} are not the pages of compiled attention")
    sinks = tuple(None if each is None else each.float().contiguous() for each in scores.sink_logits)
    scores = replace(scores, sink_logits=sinks)

    def step(batch: Batch) -> CpuAttention:
        return CpuAttention(pages, batch, windows, rotate, scores=scores)

    return step


def prepare_layers(
    model: Model, cache: KVCache, windows: tuple[int | None, ...], programmatic_launch: str = AUTO
) -> CpuLayers:
    """All layers in one call."""
    if not isinstance(cache.pages, CpuPages):
        raise TypeError(f"{type(cache.pages).__name__} are not the pages of compiled layers")
    return CpuLayers(model, cache.pages, windows)

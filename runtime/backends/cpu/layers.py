"""All layers of a decoder in one call of compiled code (`layers.h`): no Python stands between their products."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from compress.common.errors import ToolkitError
from compress.cpu.binding import BEST, library
from compress.cpu.linear import NativeLinear
from runtime.backends.base import Linear
from runtime.backends.cpu.attention import NativeAttention, PagedAttentionCall
from runtime.backends.cpu.kv_pages import NativePages
from runtime.backends.cpu.ops import NativeOps
from runtime.model.decoder import Decoder, Layer


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
        ("turned", c_int32),
        *((name, c_void_p) for name in ("hidden", "update", "cos", "sin", "slots")),
        ("attention", PagedAttentionCall),
    )


class NativeLayers:
    """The layers of a decoder over native pages: the same bits as when its functions are called one by one.

    Args:
        windows: sliding window of every layer; None is none.
    """

    def __init__(
        self, decoder: Decoder, pages: NativePages, windows: tuple[int | None, ...], instruction_set: int = BEST
    ) -> None:
        native = library()
        if native is None:
            raise ValueError("there is no native library")
        self._run = native.decoder_layers
        self._run.argtypes, self._run.restype = (c_void_p, c_int64, c_void_p, c_int), c_int
        self._instruction_set = instruction_set
        self._kept = decoder.layers, pages  # their memory is what the structures point at
        self._eps = decoder.config.norm_eps
        layers = zip(decoder.layers, pages.addresses, windows, strict=True)
        filled = [_layer(layer, ctypes.addressof(address), window) for layer, address, window in layers]
        self._layers = (_DecoderLayer * len(filled))(*filled)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: NativeAttention) -> Tensor:
        """Hidden states `[T, H]` after all layers, in the memory of `hidden`; cosine and sine as for `Ops.rotate`.

        Raises:
            ToolkitError: no memory, or not the instruction set that was asked for.
        """
        update = torch.empty_like(hidden)
        step = _LayersStep(
            rows=len(hidden),
            eps=self._eps,
            turned=attention.turned,
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


def refuse_layers(decoder: Decoder) -> str:
    """Why a decoder's layers cannot run in one call; empty when they can."""
    if not isinstance(decoder.ops, NativeOps):
        return "ops between linears are not compiled"
    others = {type(linear).__name__ for layer in decoder.layers for linear in _linears(layer)} - {NativeLinear.__name__}
    return f"takes native linears only, not {', '.join(sorted(others))}" if others else ""


def _linears(layer: Layer) -> tuple[Linear, Linear, Linear, Linear]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _layer(layer: Layer, pages: int, window: int | None) -> _DecoderLayer:
    norms = layer.attention_norm, layer.mlp_norm, layer.head_norm
    pointers = [None if norm is None else norm.data_ptr() for norm in norms]
    products = [_product(linear) for linear in _linears(layer)]
    return _DecoderLayer(*pointers, *products, pages, window or 0)


def _product(linear: Linear) -> _Product:
    if not isinstance(linear, NativeLinear):
        raise ValueError(f"{type(linear).__name__} is no native linear")
    return _Product(linear.address, linear.activations)

"""Which kernel serves which quantized linear, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.checkpoint.scheme import Scheme
from compress.common.errors import SchemeError
from runtime.backends.base import Kernel, Target
from runtime.backends.cpu import linear as cpu_linear
from runtime.backends.cpu.kv_pages import NativePages
from runtime.backends.cpu.layers import NativeLayers, refuse_layers
from runtime.backends.kv.cache import KVCache
from runtime.backends.torch import dequantized, int4pack, int8_dynamic, reference, semi_structured
from runtime.backends.triton import linear as triton_linear
from runtime.backends.triton.layers import TritonLayers, refuse_triton_layers
from runtime.core.attention_window import AttentionWindow
from runtime.model.decoder import Decoder

KERNELS = (
    *triton_linear.KERNELS,
    cpu_linear.INT8,
    cpu_linear.SPARSE,
    cpu_linear.KERNEL,
    int8_dynamic.KERNEL,
    int4pack.KERNEL,
    dequantized.KERNEL,
    reference.KERNEL,
)
"""Of integers, in order of preference; the last one refuses nothing."""

FP8_KERNELS = (*triton_linear.FP8_KERNELS, dequantized.KERNEL, reference.KERNEL)
"""Of 8-bit floats, likewise."""

MODES = {"auto": KERNELS, "w4a8": (cpu_linear.W4A8, *KERNELS), semi_structured.NAME: KERNELS}
"""Preferences for integers by name: `auto` computes what the checkpoint says, `w4a8` rounds activations to 8 bits where
it can, `semi_structured` is about 16-bit weights that are 2:4 alone."""

EXPANDED = "zeros of {} are expanded at load: no kernel leaves them out on a GPU"


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel for the codes of a scheme (integers, or 8-bit floats), and why it and none before it."""

    kernel: Kernel[Any]
    reason: str


def choose_kernel(
    scheme: Scheme, in_features: int, target: Target, kernels: str = "auto", excluded: Mapping[str, str] | None = None
) -> Choice:
    """The first kernel of the table that can serve a quantized linear.

    Args:
        kernels: a name of `MODES`, or of a kernel that must be used.
        excluded: names of kernels that may not be chosen, with the reason.

    Raises:
        SchemeError: an unknown name, or a named kernel that cannot serve this scheme here.
    """
    if kernels not in MODES:
        return _named(scheme, in_features, target, kernels)
    refusals = [EXPANDED.format(scheme.sparsity)] if scheme.sparsity and target.device.type == "cuda" else []
    if scheme.fp8:
        refusals += [f"{kernel.name} multiplies by integers" for kernel in MODES[kernels] if kernel not in KERNELS]
    for kernel in FP8_KERNELS if scheme.fp8 else MODES[kernels]:
        refusal = (excluded or {}).get(kernel.name) or kernel.refuse(scheme, in_features, target)
        if not refusal:
            return Choice(kernel, "; ".join([kernel.summary, *refusals]))
        refusals.append(f"{kernel.name} {refusal}")
    raise SchemeError(f"no kernel serves {scheme}: {'; '.join(refusals)}")


def check_name(kernels: str) -> None:
    """Raises SchemeError for what is neither a mode nor a kernel: where no weight is quantized nothing else would."""
    names = list(dict.fromkeys([*MODES, *(kernel.name for kernel in (*KERNELS, *FP8_KERNELS))]))
    if kernels not in names:
        raise SchemeError(f"unknown kernel {kernels!r}", f"Choose {', '.join(names)}")


def _named(scheme: Scheme, in_features: int, target: Target, name: str) -> Choice:
    check_name(name)
    table, other = (FP8_KERNELS, KERNELS) if scheme.fp8 else (KERNELS, FP8_KERNELS)
    kernel = next(kernel for kernel in (*table, *other) if kernel.name == name)
    numbers = "integers" if scheme.fp8 else "8-bit floats"
    refusal = kernel.refuse(scheme, in_features, target) if kernel in table else f"multiplies by {numbers}"
    if refusal:
        raise SchemeError(f"kernel {name} cannot serve {scheme}: it {refusal}", "Choose auto or reference")
    return Choice(kernel, f"asked for; {kernel.summary}")


@dataclass(frozen=True, slots=True)
class LayersChoice:
    """One of the two, or why the decoder goes from layer to layer itself.

    Attributes:
        refusal: empty where one of them serves.
    """

    native: NativeLayers | None = None
    triton: TritonLayers | None = None
    refusal: str = ""


def choose_layers(
    decoder: Decoder,
    cache: KVCache,
    windows: tuple[int | None, ...],
    attention_window: AttentionWindow,
    triton_refusal: str,
) -> LayersChoice:
    """The fastest way through the layers that these pages allow.

    Args:
        windows: sliding window of every layer; None is none.
        triton_refusal: why attention does not run in Triton; empty when it does.
    """
    if isinstance(cache.pages, NativePages):
        refusal = refuse_layers(decoder)
        return LayersChoice(refusal=refusal) if refusal else LayersChoice(NativeLayers(decoder, cache.pages, windows))
    if decoder.device.type == "cpu":
        return LayersChoice(refusal="keys and values are not in native pages")
    refusal = refuse_triton_layers(decoder, triton_refusal, attention_window)
    return LayersChoice(refusal=refusal) if refusal else LayersChoice(triton=TritonLayers(decoder, cache))

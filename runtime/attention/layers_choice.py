"""What computes the layers of a step: one call of compiled code, fused kernels of a GPU, or neither."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.attention.gpu_layers import TritonLayers, refuse_triton_layers
from runtime.attention.native_layers import NativeLayers, refuse_layers
from runtime.model.decoder import Decoder
from runtime.model.kv_cache import KVCache
from runtime.model.pages_native import NativePages
from runtime.reach import Reach


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
    decoder: Decoder, cache: KVCache, windows: tuple[int | None, ...], reach: Reach, triton_refusal: str
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
    refusal = refuse_triton_layers(decoder, triton_refusal, reach)
    return LayersChoice(refusal=refusal) if refusal else LayersChoice(triton=TritonLayers(decoder, cache))

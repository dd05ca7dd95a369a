"""The layers of a decoder as a handful of Triton kernels: what stands between two products is one launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.backends.base import FusedLinear, Product, fused
from runtime.backends.kv.cache import KVCache
from runtime.backends.triton.attention import TritonAttention
from runtime.backends.triton.kernels.page_views import layer_pages
from runtime.backends.triton.ops import TritonOps
from runtime.core.attention_window import AttentionWindow
from runtime.model.decoder import Decoder, Layer


@dataclass(frozen=True, slots=True)
class _Products:
    qkv: FusedLinear
    output: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear


class TritonLayers:
    """The layers of a decoder over pages in the layouts of plain torch, with the numbers of `TorchOps`.

    Launches of a layer: norm; qkv; heads turned, keys and values written; attention and the join of its splits, for
    each group of sequences; its output put into the form that the output product takes (none for 16-bit rows); output;
    norm; gate and up; gate; down. That is 11, or 10. A linear that is no `FusedLinear` is called as it is, with 16-bit
    rows, and launches what it likes. Each of these launches depends on shapes only, and nothing waits for the GPU, so
    the layers can be captured in a graph.
    """

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        from runtime.backends.triton.kernels import norm_act, rope_kv_write

        self._rows, self._turn = norm_act, rope_kv_write
        self._decoder = decoder
        self._products = [_products(layer) for layer in decoder.layers]
        tensors, scheme = cache.pages.memory.tensors, cache.scheme
        self._pages = [layer_pages(tensors, scheme, index) for index in range(len(decoder.layers))]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: TritonAttention) -> Tensor:
        """Hidden states `[T, H]` after all layers, in the memory of `hidden`; cosine and sine as for `Ops.rotate`."""
        update: Product | None = None
        for index in range(len(self._products)):
            update = self._mlp(index, hidden, self._attend(index, hidden, update, cos, sin, attention))
        return hidden if update is None else hidden.add_(self._rows.finish(update, hidden.dtype))

    def _attend(
        self, index: int, hidden: Tensor, update: Product | None, cos: Tensor, sin: Tensor, attention: TritonAttention
    ) -> Product:
        layer, products = self._decoder.layers[index], self._products[index]
        eps, tokens = self._decoder.config.norm_eps, len(hidden)
        normed = self._rows.norm(hidden, update, layer.attention_norm, eps, products.qkv.input_form(tokens))
        qkv, slots = products.qkv.product(normed), attention.keys.batch.slots
        query = self._turn.write_turned(qkv, layer.head_norm, eps, cos, sin, slots, self._pages[index])
        attended = attention.attend(index, query).flatten(1)
        return products.output.product(self._rows.prepared(attended, products.output.input_form(tokens)))

    def _mlp(self, index: int, hidden: Tensor, update: Product) -> Product:
        layer, products = self._decoder.layers[index], self._products[index]
        eps, tokens = self._decoder.config.norm_eps, len(hidden)
        normed = self._rows.norm(hidden, update, layer.mlp_norm, eps, products.gate_up.input_form(tokens))
        gate_up = products.gate_up.product(normed)
        return products.down.product(self._rows.gate(gate_up, products.down.input_form(tokens), hidden.dtype))


def refuse_triton_layers(decoder: Decoder, attention_refusal: str, attention_window: AttentionWindow) -> str:
    """Why a decoder's layers cannot run in fused kernels; empty when they can.

    Args:
        attention_refusal: why attention does not run in Triton, if so.
    """
    if attention_refusal:
        return f"attention is plain torch: Triton {attention_refusal}"
    if not isinstance(decoder.ops, TritonOps):
        return "ops between linears are not in Triton"
    return (
        "queries of streams with sinks stand at two places"
        if attention_window.window is not None and attention_window.sinks
        else ""
    )


def _products(layer: Layer) -> _Products:
    return _Products(*(fused(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)))

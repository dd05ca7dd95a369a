"""The layers of a decoder as a handful of Triton kernels: what stands between two products is one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.backends.base import LayerWeights, Linear, Model, Target, attention_linears, mlp_linears, plain_weight
from runtime.backends.fused_layers import layers_unsupported
from runtime.backends.kv_pages import KVCache
from runtime.backends.torch.ops import TorchOps
from runtime.backends.triton.attention import TritonAttention, layer_pages, token_pages
from runtime.backends.triton.fused_linear import ActivationLayout, PartialSums, finished, fused
from runtime.backends.triton.linear import device_unsupported_reason, unsupported_reason
from runtime.core.batch import SamplingTensors
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig


class TritonOps(TorchOps):
    """See `Ops`. What turns heads is plain torch: where pages are written, `TritonLayers` does it on the way."""

    def __init__(self) -> None:
        from runtime.backends.triton.kernels import norm_act

        self._launch = norm_act

    def add_rms_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        product = None if update is None else finished(update)
        return self._launch.add_rms_norm(hidden, product, weight, eps, ActivationLayout()).rows

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._launch.silu_and_mul(finished(gate_up), ActivationLayout(), gate_up.dtype).rows


class TritonLayers:
    """The layers of a decoder over pages in the layouts of plain torch, with the numbers of `TorchOps`.

    Launches of a layer: norm; qkv; heads rotated, keys and values written; attention and the join of its splits, for
    each group of sequences; its output put into the form that the output product takes (none for 16-bit rows); output;
    norm; gate and up; gate; down. That is 11, or 10. A linear that is no `FusedLinear` is called as it is, with 16-bit
    rows, and launches what it likes. Each of these launches depends on shapes only, and nothing waits for the GPU, so
    the layers can be captured in a graph.
    """

    def __init__(self, decoder: Model, cache: KVCache) -> None:
        from runtime.backends.triton.kernels import norm_act, rope_kv_write

        self._norm_act, self._rope_kv_write = norm_act, rope_kv_write
        self._decoder = decoder
        self._products = [tuple(map(fused, _linears(layer))) for layer in decoder.layers]
        pages = token_pages(cache)
        self._pages = [layer_pages(pages, cache.scheme, index) for index in range(len(decoder.layers))]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: TritonAttention) -> Tensor:
        """Hidden states `[T, H]` after all layers, in the memory of `hidden`; cosine and sine as for `Ops.rotate`."""
        update: PartialSums | None = None
        for index in range(len(self._products)):
            update = self._mlp(index, hidden, self._attend(index, hidden, update, cos, sin, attention))
        return hidden if update is None else hidden.add_(self._norm_act.split_k_reduce(update, hidden.dtype))

    def _attend(
        self,
        index: int,
        hidden: Tensor,
        update: PartialSums | None,
        cos: Tensor,
        sin: Tensor,
        attention: TritonAttention,
    ) -> PartialSums:
        layer, (qkv_product, output, *_) = self._decoder.layers[index], self._products[index]
        eps, tokens, kernels = self._decoder.config.norm_eps, len(hidden), self._norm_act
        layout = qkv_product.activation_layout(tokens)
        qkv = qkv_product.product(kernels.add_rms_norm(hidden, update, plain_weight(layer.attention_norm), eps, layout))
        slots, pages = attention.keys.batch.slots, self._pages[index]
        query = self._rope_kv_write.qk_norm_rope_kv_write(qkv, layer.head_norm, eps, cos, sin, slots, pages)
        attended = attention.attend(index, query).flatten(1)
        return output.product(kernels.convert_input(attended, output.activation_layout(tokens)))

    def _mlp(self, index: int, hidden: Tensor, update: PartialSums) -> PartialSums:
        layer, (_, _, *products) = self._decoder.layers[index], self._products[index]
        eps, tokens, kernels = self._decoder.config.norm_eps, len(hidden), self._norm_act
        layout = products[0].activation_layout(tokens) if products else ActivationLayout()
        normed = kernels.add_rms_norm(hidden, update, plain_weight(layer.mlp_norm), eps, layout)
        if layer.experts is not None and layer.experts.kernel is not None:
            return finished(layer.experts.kernel(normed.rows))
        gate_up_product, down = products
        gate_up = gate_up_product.product(normed)
        return down.product(kernels.silu_and_mul(gate_up, down.activation_layout(tokens), hidden.dtype))


def _linears(layer: LayerWeights) -> tuple[Linear, ...]:
    """Returns the linears of a layer; those of a mixture belong to its kernel."""
    return *attention_linears(layer), *(() if layer.experts is not None else mlp_linears(layer))


def layers_unsupported_reason(decoder: Model, memory: MemoryPlan) -> str:
    """Why a decoder's layers cannot run in fused kernels; "" when they can."""
    if reason := layers_unsupported(decoder.config.spec):
        return reason
    if any(layer.experts is not None and layer.experts.kernel is None for layer in decoder.layers):
        return "computes no mixtures that go from expert to expert"
    if not isinstance(decoder.ops, TritonOps):
        return "ops between linears are not in Triton"
    if memory.attention_window.window is not None and memory.attention_window.sinks:
        return "queries of streams with sinks stand at two places"
    return ""


def ops_unsupported_reason(config: DecoderConfig, target: Target) -> str:
    """Why Triton cannot compute ops on a target; "" when it can."""
    return unsupported_reason(target.device, target.dtype)


class TritonSampling:
    """Tokens of all rows of a step from float32 logits: two launches without top-k, top-p or min-p."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str:
        return device_unsupported_reason(device) or ("" if dtype == torch.float32 else "reads float32 logits")

    def sample(self, logits: Tensor, scores: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
        from runtime.backends.triton.kernels.sampling import sample_rows

        sample_rows(logits, scores, tensors, tokens)

    def sample_listed(
        self,
        scores: Tensor,
        ids: Tensor,
        unknown: Tensor,
        is_truncated: Tensor,
        tensors: SamplingTensors,
        tokens: Tensor,
    ) -> None:
        from runtime.backends.triton.kernels.sampling import sample_from_listed

        sample_from_listed(scores, ids, unknown, is_truncated, tensors, tokens)

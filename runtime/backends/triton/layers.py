"""The layers of a decoder as a handful of Triton kernels: what stands between two products is one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import AUTO
from runtime.backends.backend import Candidates
from runtime.backends.base import Target, plain_weight
from runtime.backends.fused_layers import layers_unsupported
from runtime.backends.kv_pages import KVCache
from runtime.backends.mlp import ComputeMixture
from runtime.backends.model import Layer, Model
from runtime.backends.torch.ops import TorchOps
from runtime.backends.triton.attention import HeadPages, TritonAttention, layer_pages, token_pages
from runtime.backends.triton.device import device_unsupported_reason, overlaps_kernels, unsupported_reason
from runtime.backends.triton.fused_linear import ActivationLayout, FusedLinear, PartialSums, finished, fused
from runtime.core.batch import SamplingTensors
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.norm_act import InputRoom


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

    Launches of a layer, whatever the step holds: norm; qkv; heads rotated, keys and values written; attention and, if
    keys of some sequence are split, their join; output; norm; gate and up; gate; down. That is 10, or 9. The join puts
    its rows into rows with sums, if the output product takes those; other forms, and sums without a join, are one more
    launch. The work list of attention is made once a step for each window. A linear that is not a `FusedLinear` is
    called as it is, with 16-bit rows, and launches what it likes. Each of these launches depends on shapes only, and
    nothing waits for the GPU, so the layers can be captured in a graph.

    Args:
        overlaps: kernels start before those ahead of them have ended, see `launcher.overlapping`.
    """

    def __init__(self, decoder: Model, cache: KVCache, overlaps: bool = False) -> None:
        from runtime.backends.triton import launcher
        from runtime.backends.triton.kernels import norm_act, rope_kv_write

        self._norm_act, self._rope_kv_write = norm_act, rope_kv_write
        self._overlapping = partial(launcher.overlapping, overlaps)
        self._eps, pages = decoder.config.spec.final_norm.eps, token_pages(cache)
        self._layers = [
            FusedLayer.of(index, layer, layer_pages(pages, cache.scheme, index))
            for index, layer in enumerate(decoder.layers)
        ]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: TritonAttention) -> Tensor:
        """Hidden states `[T, H]` after all layers, in the memory of `hidden`; cosine and sine as for `Ops.rotate`."""
        update: PartialSums | None = None
        room = self._norm_act.InputRoom(hidden, hidden.shape[0], hidden.dtype)
        with self._overlapping():
            for layer in self._layers:
                update = self._mlp(layer, hidden, self._attend(layer, hidden, update, cos, sin, attention, room), room)
            return hidden if update is None else hidden.add_(self._norm_act.split_k_reduce(update, hidden.dtype))

    def _attend(
        self,
        layer: FusedLayer,
        hidden: Tensor,
        update: PartialSums | None,
        cos: Tensor,
        sin: Tensor,
        attention: TritonAttention,
        room: InputRoom,
    ) -> PartialSums:
        eps, tokens, kernels = self._eps, hidden.shape[0], self._norm_act
        layout = layer.qkv.activation_layout(tokens)
        qkv = layer.qkv.product(kernels.add_rms_norm(hidden, update, layer.attention_norm, eps, layout, room))
        slots = attention.keys.batch.slots
        query = self._rope_kv_write.qk_norm_rope_kv_write(qkv, layer.head_norm, eps, cos, sin, slots, layer.pages)
        layout = layer.output.activation_layout(tokens)
        return layer.output.product(attention.attend(layer.index, query, form=layout, room=room))

    def _mlp(self, layer: FusedLayer, hidden: Tensor, update: PartialSums, room: InputRoom) -> PartialSums:
        tokens, kernels = hidden.shape[0], self._norm_act
        if layer.mixture is not None:
            normed = kernels.add_rms_norm(hidden, update, layer.mlp_norm, self._eps, ActivationLayout(), room)
            return finished(layer.mixture(normed.rows))
        gate_up, down = layer.mlp
        layout = gate_up.activation_layout(tokens)
        product = gate_up.product(kernels.add_rms_norm(hidden, update, layer.mlp_norm, self._eps, layout, room))
        return down.product(kernels.silu_and_mul(product, down.activation_layout(tokens), hidden.dtype, room))


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights and pages of a layer, as its launches read them.

    Attributes:
        index: of the layer.
        attention_norm, mlp_norm: weights `[H]`.
        head_norm: weights `[heads + kv_heads, D]`, or None.
        mlp: linears for gate and up, and down; empty in layers with a mixture.
        pages: of keys and values.
    """

    index: int
    attention_norm: Tensor
    qkv: FusedLinear
    head_norm: Tensor | None
    output: FusedLinear
    mlp_norm: Tensor
    mlp: tuple[FusedLinear, ...]
    mixture: ComputeMixture | None
    pages: HeadPages

    @classmethod
    def of(cls, index: int, layer: Layer, pages: HeadPages) -> FusedLayer:
        """Collects it from the weights of a layer that `layers_unsupported_reason` finds nothing against."""
        qkv, output, *mlp = map(fused, layer.linears)
        head_norm = None if layer.attention is None else layer.attention.head_norm
        mixture = None if layer.experts is None else layer.experts.kernel
        norms = plain_weight(layer.norm), plain_weight(layer.mlp_norm)
        return cls(index, norms[0], qkv, head_norm, output, norms[1], tuple(mlp), mixture, pages)


def prepare_layers(
    model: Model, cache: KVCache, windows: tuple[int | None, ...], programmatic_launch: str = AUTO
) -> TritonLayers:
    """A handful of launches per layer."""
    return TritonLayers(model, cache, overlaps_kernels(model.device, programmatic_launch))


def layers_unsupported_reason(decoder: Model, memory: MemoryPlan) -> str:
    """Why a decoder's layers cannot run in fused kernels; "" when they can."""
    if reason := layers_unsupported(decoder.config.spec):
        return reason
    if decoder.config.whole is not None:
        return "computes no stages"
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

    def sample_listed(self, listed: Candidates, is_truncated: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
        from runtime.backends.triton.kernels.sampling import sample_from_listed

        sample_from_listed(listed, is_truncated, tensors, tokens)

"""Mixtures of experts of 2- to 4-bit codes on NVIDIA GPUs: two grouped products for all experts of a layer, or for
those of a round where experts are in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.backends.base import Linear, Target
from runtime.backends.expert_slots import ExpertSlots
from runtime.backends.fused_layers import is_gated_silu, is_plain_mixture
from runtime.backends.mlp import Expert, Experts
from runtime.backends.triton.device import unsupported_reason
from runtime.backends.triton.layers import TritonOps

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.weight_layout import InterleavedWeight


class TritonMixture:
    """A mixture whose products depend on shapes only and wait for nothing, so that a graph can capture them; with
    experts in host memory the host waits for the choice of experts.

    An expert reads the rows that chose it; its result is added in float32.
    """

    def __init__(self, weights: Experts) -> None:
        from runtime.backends.triton.kernels import grouped_gemm

        self._weights, self._kernels, self._ops = weights, grouped_gemm, TritonOps()
        experts = weights.experts if weights.slots is None else weights.slots.slots
        self._gate_up = grouped_gemm.GroupedWeight(packed([expert.gate_up for expert in experts]))
        self._down = grouped_gemm.GroupedWeight(packed([expert.down for expert in experts]))

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`; the router reads `routed [T, H]` if that is given."""
        weights, chosen = self._weights.route(x if routed is None else routed)
        slots, x = self._weights.slots, x.contiguous()
        parts = self._products(x, chosen) if slots is None else self._in_rounds(x, chosen, slots)
        out = torch.bmm(weights.float().unsqueeze(1), parts.float()).squeeze(1).to(x.dtype)
        shared = self._weights.shared
        return out if shared is None else out.add_(self._shared(shared, x))

    def _products(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Computes `[T, k, H]`, what each of the chosen experts gives."""
        blocks = self._kernels.block_rows(chosen, len(self._weights.experts))
        inner = self._ops.silu_and_mul(self._gate_up.product(x, blocks, chosen.shape[1]))
        return self._down.product(inner, blocks, 1).view(*chosen.shape, -1)

    def _in_rounds(self, x: Tensor, chosen: Tensor, slots: ExpertSlots) -> Tensor:
        """Computes the same bits as `_products`: a row depends on its block's size, not on its other rows."""
        block_m = self._kernels.rows_per_block(chosen.numel(), slots.num_experts)
        parts = x.new_empty(*chosen.shape, x.shape[1])
        on_host = chosen.cpu()  # the only wait for the GPU
        for slot_of in slots.rounds(on_host):
            slot = slot_of[on_host]
            token, place = (slot >= 0).nonzero(as_tuple=True)
            token, place, slot = torch.stack([token, place, slot[token, place]]).to(x.device, non_blocking=True)
            blocks = self._kernels.block_rows(slot.unsqueeze(1), len(slots.slots), block_m)
            inner = self._ops.silu_and_mul(self._gate_up.product(x[token], blocks, 1))
            parts[token, place] = self._down.product(inner, blocks, 1)
        return parts

    def _shared(self, expert: Expert, x: Tensor) -> Tensor:
        found, gate = expert.down(self._ops.silu_and_mul(expert.gate_up(x))), self._weights.shared_gate
        return found if gate is None else found * (x @ gate.T).sigmoid()


def packed(linears: Sequence[Linear]) -> list[InterleavedWeight]:
    """Returns the weights of linears in planes of codes without biases; empty unless all of them are such, alike."""
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear

    weights = [each.weight for each in linears if isinstance(each, W4A16Linear) and each.bias is None]
    kinds = {(w.bits, w.group_size, w.shape, w.scale_dtype) for w in weights}
    return weights if len(weights) == len(linears) and len(kinds) == 1 else []


def mixture_unsupported_reason(weights: Experts, target: Target) -> str:
    """Why a mixture cannot be computed by grouped products on a target; "" when it can."""
    if reason := unsupported_reason(target.device, target.dtype):
        return reason
    if not is_plain_mixture(weights.spec) or not all(is_gated_silu(mlp) for mlp in weights.spec.mlps):
        return "computes experts with gated silu, and plain routers"
    parts = [expert.gate_up for expert in weights.experts], [expert.down for expert in weights.experts]
    return "" if all(map(packed, parts)) else "takes experts of 2 to 8 bits that are packed alike, without biases"

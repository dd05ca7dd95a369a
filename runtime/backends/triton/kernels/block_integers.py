"""Integers with scales and minima of groups, as K types of GGUF have them, by the skinny GEMM of integer codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.weights.coded import CodedWeight
from runtime.backends.triton.fused_linear import ActivationLayout, PartialSums, QuantizedInput
from runtime.backends.triton.kernels.configs import BUCKETS, EXPAND, KernelConfig, Plan, default_plan
from runtime.backends.triton.kernels.norm_act import PackedLinear
from runtime.backends.triton.kernels.w4a16 import W4A16Linear
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, interleave_codes

LOST = 2.0**-26
"""Part of a minimum below which float32 loses what is added to it."""
MOST_TOKENS = 32
"""Tokens of one program."""


@dataclass(frozen=True, slots=True)
class BlockIntegerLinear(PackedLinear):
    """A weight whose zero points are fractions, which 16 bits do not hold: products of planes that centre codes may not
    take it.

    Attributes:
        planes: the linear, whose plan has skinny GEMMs, and panels for many tokens.
    """

    planes: W4A16Linear

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return self.planes.activation_layout(num_tokens)

    def product(self, x: QuantizedInput) -> PartialSums:
        return self.planes.product(x)


def interleaved(weight: CodedWeight, device: torch.device) -> InterleavedWeight:
    """Planes with float32 scales and the zero points `minimum / scale`. A group whose multiples of its scale vanish
    compared with the minimum has codes 0, the minimum as scale and zero point 1."""
    codes, scales, minima = weight.qweight, weight.group_scales(), weight.group_minima()
    bits, group = weight.scheme.bits, weight.scheme.columns(weight.shape[1])
    if minima is None:
        return interleave_codes(codes, scales, torch.full_like(scales, weight.scheme.zero), bits, group, device)
    is_flat = scales.abs() * weight.scheme.max_code <= minima.abs() * LOST
    codes = codes.masked_fill(is_flat.repeat_interleave(group, 1), 0)
    zeros = torch.where(is_flat, 1.0, minima / torch.where(is_flat, 1.0, scales))
    return interleave_codes(codes, torch.where(is_flat, minima, scales), zeros, bits, group, device)


def skinny_plan(bits: int, rows: int, num_tiles: int, num_processors: int, panel_from: int) -> Plan:
    """Skinny GEMMs, whose inputs are split for few tokens only, and panels from a number of tokens on."""
    found = default_plan(bits, rows, num_tiles, num_processors)
    panels = KernelConfig(EXPAND)
    return {tokens: panels if tokens >= panel_from else found[min(tokens, MOST_TOKENS)] for tokens in BUCKETS}


def linear_of(
    weight: CodedWeight, bias: Tensor | None, device: torch.device, processors: int, panel_from: int
) -> BlockIntegerLinear:
    """The linear of a weight `[N, K]` on a device, multiplied by panels from a number of tokens on."""
    planes = interleaved(weight, device)
    tiles, rows, _ = planes.words.shape
    plan = skinny_plan(planes.bits, rows, tiles, processors, panel_from)
    return BlockIntegerLinear(W4A16Linear(planes, bias, plan))

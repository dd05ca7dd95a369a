"""Mixtures of experts in one compiled call, compared with their experts one after the other, in turns on one core."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarking.cpu.kernels import TARGET, random_weight
from benchmarking.machine import median_ratio, take_turns
from benchmarking.tables import Row
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.models.linear import Linear as LinearSpec
from compress.models.mlp import MLP, Mixture
from compress.models.router import Router
from runtime.backends.backend import LinearKernel
from runtime.backends.base import Linear
from runtime.backends.cpu.layers import CpuOps
from runtime.backends.cpu.linear_kernels import PACKED, W4A8
from runtime.backends.cpu.mixture import CpuMixture
from runtime.backends.mlp import Expert, Experts

LAYERS = 3
"""Mixtures that take turns, so that no weight stays in the caches."""


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of one layer."""

    hidden: int
    inner: int
    experts: int
    chosen: int

    def __str__(self) -> str:
        return f"{self.chosen} of {self.experts} experts of {self.hidden}x{self.inner}"


def parse_shape(text: str) -> MixtureShape:
    """Reads `1024x512x64x10`: hidden size, width of an expert, experts, chosen ones."""
    return MixtureShape(*map(int, text.split("x")))


def mixture_rows(shape: MixtureShape, numbers_of_rows: Sequence[int], seconds: float) -> list[Row]:
    """One line per form and number of rows: milliseconds of processor time and what the single call gains."""
    rows = []
    for kernel in (PACKED, W4A8):
        layers = [_random_experts(shape, kernel) for _ in range(LAYERS)]
        for count in numbers_of_rows:
            taken = take_turns(_ways(layers, torch.randn(count, shape.hidden).bfloat16()), seconds)
            times = {name: f"{statistics.median(each):.2f}" for name, each in taken.items()}
            rows.append(
                {"kernel": kernel.name, "rows": str(count)} | times | {"x": f"{median_ratio(*taken.values()):.2f}"}
            )
    return rows


def _ways(layers: Sequence[Experts], x: Tensor) -> dict[str, Callable[[int], object]]:
    ops, calls = CpuOps(), [CpuMixture(layer) for layer in layers]
    return {
        "expert by expert": lambda turn: layers[turn % LAYERS](x, x, ops),
        "one call": lambda turn: calls[turn % LAYERS](x),
    }


def _random_experts(shape: MixtureShape, kernel: LinearKernel[CodedWeight]) -> Experts:
    def linear(rows: int, columns: int) -> Linear:
        return kernel.prepare(random_weight(rows, columns, Int(4, 128)), None, TARGET)

    router = Router(LinearSpec("gate", shape.experts, shape.hidden), shape.chosen)
    experts = (
        Expert(linear(2 * shape.inner, shape.hidden), linear(shape.hidden, shape.inner)) for _ in range(shape.experts)
    )
    mlp = MLP((), LinearSpec("down", shape.hidden, shape.inner))
    return Experts(
        Mixture(router, (mlp,) * shape.experts),
        torch.randn(shape.experts, shape.hidden).bfloat16() * 0.1,
        tuple(experts),
    )

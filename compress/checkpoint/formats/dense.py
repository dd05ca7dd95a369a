"""Dense tensors: `compress export --format dense`, for engines that read nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, SGLANG, TRANSFORMERS, VLLM, Container
from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.weights.base import Get
from compress.common.errors import CheckpointError


class Dense(Container):
    """Dense tensors."""

    name = "dense"
    engines = RUNTIME, TRANSFORMERS, VLLM, SGLANG
    stored = (".weight",)

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        """Accepts every scheme: all can be dequantized."""

    def encode(self, module: str, weight: Weight, dtype: torch.dtype) -> dict[str, Tensor]:
        """The dequantized weight in the model's dtype, rounded once."""
        return {f"{module}.weight": weight.dequantize(dtype)}

    def decode(self, module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> Weight:
        """Always raises CheckpointError: dense values have no codes."""
        raise CheckpointError(f"{module} is dense and has no integer codes", "Quantize it: compress quantize MODEL")

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        rows, columns = get(f"{module}.weight").shape
        return rows, columns

    def modules(self, names: Iterable[str]) -> list[str]:
        """No module is quantized."""
        return []

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """Returns no block."""
        return {}

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Nothing is quantized."""
        return {}


DENSE = CONTAINERS.register(order=6)(Dense())

"""Dense tensors: `compress export --format dense`, for engines that read nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.weights.base import Get
from compress.common.errors import CheckpointError

NAME = "dense"


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffix of a matrix."""
    return (".weight",)


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Accepts every scheme: all can be dequantized."""


def encode(module: str, weight: Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """The dequantized weight in the model's dtype, rounded once."""
    return {f"{module}.weight": weight.dequantize(dtype)}


def decode(module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> Weight:
    """Always raises CheckpointError: dense values have no codes."""
    raise CheckpointError(f"{module} is dense and has no integer codes", "Quantize it: compress quantize MODEL")


def shape(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of a stored layer, without decoding it."""
    rows, columns = get(f"{module}.weight").shape
    return rows, columns


def modules(names: Iterable[str]) -> list[str]:
    """No module is quantized."""
    return []


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """Returns no block."""
    return {}


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Nothing is quantized."""
    return {}

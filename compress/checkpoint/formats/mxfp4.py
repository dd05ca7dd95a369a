"""MXFP4 as gpt-oss publishes it (`quant_method: mxfp4`): experts alone are quantized. It is read, not written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.formats.read_only import check as check
from compress.checkpoint.formats.read_only import quantization_config as quantization_config
from compress.checkpoint.weights import Mxfp4, Scheme
from compress.checkpoint.weights.base import owners

NAME = "mxfp4"


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffixes of a module's stored tensors."""
    return Mxfp4.suffixes


def modules(names: Iterable[str]) -> list[str]:
    """Quantized modules among tensor names."""
    return owners(names, ".weight_packed")


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module: the same for all."""
    return dict[str, Scheme].fromkeys(modules, Mxfp4())

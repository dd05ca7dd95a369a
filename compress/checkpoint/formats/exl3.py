"""EXL3 as exllamav3 publishes it (`quant_method: exl3`). It is read, not written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.weights import Exl3, Scheme
from compress.common.errors import SchemeError

NAME = "exl3"


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffixes of a module's stored tensors."""
    return Exl3.suffixes


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError: this format is only read."""
    raise SchemeError("exl3 checkpoints are read, not written", "Use --format compressed-tensors")


def modules(names: Iterable[str]) -> list[str]:
    """Quantized modules among tensor names."""
    return sorted(Exl3.modules(names))


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """Raises SchemeError: this format is only read."""
    raise SchemeError("exl3 checkpoints are read, not written", "Use --format compressed-tensors")


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module, of which only its tensors tell the width and the codebook."""
    return dict[str, Scheme].fromkeys(modules, Exl3())

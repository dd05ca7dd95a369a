"""Functions of a `Translation` for containers that are read and not written: modules of such containers import them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from compress.checkpoint.weights import Scheme
from compress.common.errors import SchemeError


def _refuse() -> NoReturn:
    raise SchemeError(
        "checkpoints of this container are read, not written",
        "Use --format compressed-tensors, compress-runtime or dense",
    )


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError: the container is only read."""
    _refuse()


def encode(module: str, weight: Any, dtype: torch.dtype) -> NoReturn:
    """Raises SchemeError: the container is only read."""
    _refuse()


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> NoReturn:
    """Raises SchemeError: the container is only read."""
    _refuse()

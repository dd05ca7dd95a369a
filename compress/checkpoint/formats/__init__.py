"""Containers of packed checkpoints, by name: modules of stateless functions with the signatures of `Format`.

Weights know their own tensors; a container says which forms it holds and describes them in config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.config import is_embedding
from compress.checkpoint.formats import awq, compress_runtime, compressed_tensors, dense, gptq
from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.weights.base import Get
from compress.common.errors import CheckpointError


class Format(Protocol):
    """Interface of every format module."""

    NAME: str

    def suffixes(self, scheme: Scheme | None = None) -> tuple[str, ...]: ...
    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None: ...
    def encode(self, module: str, weight: Any, dtype: torch.dtype) -> dict[str, Tensor]: ...
    def decode(self, module: str, get: Get, scheme: Any, config: Mapping[str, Any] | None = None) -> Weight: ...
    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]: ...
    def modules(self, names: Iterable[str]) -> list[str]: ...
    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]: ...
    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]: ...


FORMATS: dict[str, Format] = {
    compressed_tensors.NAME: compressed_tensors,
    gptq.NAME: gptq,
    awq.NAME: awq,
    dense.NAME: dense,
    compress_runtime.NAME: compress_runtime,
}


def find_format(name: str) -> Format:
    """Returns the format of this name, as `--format` or `quant_method` spells it. Raises CheckpointError for others."""
    if name not in FORMATS:
        raise CheckpointError(f"quantization format {name!r} is not supported", f"Supported: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_for(schemes: Mapping[str, Scheme]) -> Format:
    """Returns the format of a new checkpoint: the one that most engines load, unless it cannot hold a form.

    Args:
        schemes: by module; other engines read no packed embedding, whatever its scheme.
    """
    special = any(scheme.structure or is_embedding(module) for module, scheme in schemes.items())
    return compress_runtime if special else compressed_tensors

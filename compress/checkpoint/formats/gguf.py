"""Blocks of GGUF files whose codes are integers around the midpoint, or those of a weight form. They are read;
`compress.checkpoint.gguf` has the container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.gguf.types import BY_NAME
from compress.checkpoint.gguf.types.base import BlockType
from compress.checkpoint.scheme import FORMS
from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.base import Get, owners
from compress.checkpoint.weights.gguf_blocks import BlockScheme, BlockWeight
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import CheckpointError, SchemeError

NAME = "gguf"
SUFFIX = ".gguf_blocks"
Decoded = IntegerWeight | BlockWeight


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffix of the blocks."""
    return (SUFFIX,)


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError: folders do not hold blocks."""
    raise SchemeError("folders with blocks of gguf are read, not written", "Use --format compressed-tensors")


def encode(module: str, weight: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Raises SchemeError: folders do not hold blocks."""
    check(weight.scheme, weight.shape)
    return {}


def decode(module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> Decoded:
    """The form of one stored layer."""
    kind, blocks = _packed_type(_types(config or {})[module]), get(module + SUFFIX)
    if isinstance(scheme, BlockScheme):
        return scheme.from_blocks(blocks)
    if not isinstance(scheme, Int) or kind.integers is None:
        raise SchemeError(f"{module} holds blocks of {kind.name}, not {scheme}")
    codes, scales = kind.integers.read(blocks.reshape(-1, kind.nbytes))
    rows = blocks.shape[0]
    scales = scales.view(rows, -1)
    zero = torch.full(scales.shape, scheme.midpoint, dtype=torch.uint8)
    return IntegerWeight(codes.view(rows, -1), scales, zero, scheme)


def shape(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of a stored layer, without decoding it."""
    rows, row_bytes = get(module + SUFFIX).shape
    if isinstance(scheme, BlockScheme):
        return rows, row_bytes // scheme.block_bytes * scheme.block_size
    kind = next(
        kind
        for kind in BY_NAME.values()
        if kind.integers and (kind.integers.bits, kind.integers.group_size) == (scheme.bits, scheme.group_size)
    )
    return rows, row_bytes // kind.nbytes * kind.size


def modules(names: Iterable[str]) -> list[str]:
    """Quantized modules among tensor names."""
    return owners(names, SUFFIX)


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """Raises SchemeError: folders do not hold blocks."""
    raise SchemeError("folders with blocks of gguf are read, not written", "Use --format compressed-tensors")


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module, which follows from its type. Raises CheckpointError for a module without a type."""
    types, found = _types(config), dict[str, Scheme]()
    for module in modules:
        if module not in types:
            raise CheckpointError(f"quantization_config has no type for {module}", "Name the .gguf file itself")
        kind = _packed_type(types[module])
        codes = kind.integers
        found[module] = FORMS[kind.form].target() if codes is None else Int(codes.bits, codes.group_size)
    return found


def _types(config: Mapping[str, Any]) -> Mapping[str, str]:
    types = config.get("types")
    if not isinstance(types, dict):
        raise CheckpointError("quantization_config of gguf has no types", "Name the .gguf file itself")
    return types


def _packed_type(name: str) -> BlockType:
    kind = BY_NAME.get(name)
    if kind is None or not kind.is_packed:
        raise CheckpointError(f"{name!r} is no gguf type whose codes are kept", "Name the .gguf file itself")
    return kind

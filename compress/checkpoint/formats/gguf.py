"""Blocks of GGUF files whose codes are integers around the midpoint, or those of a weight form. They are read;
`compress.checkpoint.gguf` has the container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from compress.checkpoint.formats.base import CONTAINERS, LLAMA_CPP, RUNTIME, ReadOnly
from compress.checkpoint.gguf.types.base import BLOCK_TYPES, BlockType
from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.base import Get
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import CheckpointError, SchemeError

SUFFIX = ".gguf_blocks"


def _types(config: Mapping[str, Any]) -> Mapping[str, str]:
    types = config.get("types")
    if not isinstance(types, dict):
        raise CheckpointError("quantization_config of gguf has no types", "Name the .gguf file itself")
    return types


def _packed_type(name: str) -> BlockType:
    kind = BLOCK_TYPES.get(name)
    if kind is None or kind.scheme is None:
        raise CheckpointError(f"{name!r} is not a gguf type whose codes are kept", "Name the .gguf file itself")
    return kind


class Gguf(ReadOnly):
    """Folders with blocks of GGUF."""

    name = "gguf"
    engines = RUNTIME, LLAMA_CPP
    keys = "types"
    stored = (SUFFIX,)
    mark = SUFFIX
    is_written = True

    def decode(self, module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> CodedWeight:
        """The form of one stored layer."""
        kind = _packed_type(_types(config or {})[module])
        if kind.read is None or kind.scheme != scheme:
            raise SchemeError(f"{module} holds blocks of {kind.name}, not {scheme}")
        return kind.read(get(module + SUFFIX))

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        kind = next(kind for kind in BLOCK_TYPES.values() if kind.scheme == scheme)
        rows, row_bytes = get(module + SUFFIX).shape
        return rows, row_bytes // kind.nbytes * kind.size

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module, which follows from its type. Raises CheckpointError for a module without a type."""
        types, found = _types(config), dict[str, Scheme]()
        for module in modules:
            if module not in types:
                raise CheckpointError(f"quantization_config has no type for {module}", "Name the .gguf file itself")
            found[module] = cast(Scheme, _packed_type(types[module]).scheme)
        return found


GGUF = CONTAINERS.register(order=5)(Gguf())

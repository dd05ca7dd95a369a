"""The tensors of a GGUF file by the names, shapes and orders of Hugging Face, and its config.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.gguf import GGUF, SUFFIX
from compress.checkpoint.gguf.architectures.base import (
    ARCHITECTURES,
    FOLDER,
    Architecture,
    Config,
    Source,
    is_router,
    separated,
)
from compress.checkpoint.gguf.file import GGUFFile, StoredTensor
from compress.checkpoint.gguf.parts import open_parts
from compress.checkpoint.gguf.types import dequantize, plain
from compress.checkpoint.gguf.types.base import BlockType
from compress.checkpoint.safetensors import LazyTensor, MappedFile
from compress.checkpoint.weights.layouts import Blocks
from compress.common.errors import CheckpointError
from compress.models.config import EXPERT_COUNTS

READ_BY_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become numbers of config.json."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def open_gguf(path: Path) -> MappedFile:
    """Reads and checks what is in front of the tensor data of a GGUF file.

    Types whose codes a weight form holds are handed out as blocks, uint8 `[O, bytes of a row]`, with rows in the order
    of Hugging Face; the format `gguf` reads them. All others have the values that the file says, 16 or 32 bits wide.

    Raises:
        CheckpointError: see `open_parts`; an architecture or a tensor that is not known.
    """
    file = open_parts(path)
    config, architecture = model_config(file), ARCHITECTURES.find(file.metadata.get("general.architecture"), FOLDER)
    entries: dict[str, LazyTensor] = {}
    owners: dict[str, str] = {}
    for name, stored in file.tensors.items():
        if name not in READ_BY_CONFIG:
            _check_experts(file, name, config)
            published = architecture.published_names(name, stored.shape[0])
            if not published:
                problem = f"{file.path}: tensor {name!r} has no place in the architecture {architecture.name!r}"
                raise CheckpointError(problem, FOLDER)
            for part, each in enumerate(published):
                if (owner := owners.setdefault(each, name)) != name:
                    raise CheckpointError(f"{file.path}: {owner!r} and {name!r} both hold {each!r}", FOLDER)
                entry = _entry(file, name, architecture, config, part, len(published))
                is_packed = entry.dtype == torch.uint8
                entries[each.removesuffix(".weight") + SUFFIX if is_packed else each] = entry
    return MappedFile(file.path, entries, file, notes=tuple(_notes(file)))


def _notes(file: GGUFFile) -> Iterator[str]:
    """Yields a line on what becomes of the types in the file."""
    counts = Counter(stored.type for stored in file.tensors.values() if stored.type.size > 1)
    for kind, count in sorted(counts.items(), key=lambda item: item[0].code):
        yield f"gguf: {count} tensors of type {kind.name} {_fate(kind)}"


def _fate(kind: BlockType) -> str:
    if isinstance(kind.scheme, Blocks):
        return "are read as they are"
    return "are read as integer codes" if kind.scheme else "are dequantized: their minima or levels fit no codes"


def _check_whole(file: GGUFFile) -> Architecture:
    for name in (EMBEDDING, "output_norm.weight"):
        if name not in file.tensors:
            raise CheckpointError(f"{file.path} has no tensor {name!r}", FOLDER)
    architecture = ARCHITECTURES.find(file.metadata.get("general.architecture"), FOLDER)
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if (count := file.metadata.get(f"{architecture.name}.block_count")) != len(layers):
        raise CheckpointError(f"{file.path} has tensors of {len(layers)} layers, and block_count is {count!r}", FOLDER)
    return architecture


def _check_experts(file: GGUFFile, name: str, config: Config) -> None:
    shape, key = file.tensors[name].shape, next((key for key in EXPERT_COUNTS if key in config), None)
    if name.endswith("_exps.weight") != (len(shape) == 3) or (len(shape) == 3 and shape[0] != config.get(key or "")):
        experts = f"{config[key]} experts" if key else "no experts"
        raise CheckpointError(f"{file.path}: {name!r} has the shape {list(shape)}, and metadata say {experts}", FOLDER)


def _entry(file: GGUFFile, name: str, architecture: Architecture, config: Config, part: int, parts: int) -> LazyTensor:
    """Describes one of the equal parts of a stored tensor: the matrices of a stack of experts."""
    stored, heads = file.tensors[name], architecture.heads_of(name, config)
    if heads is not None and stored.shape[0] % (2 * heads):
        raise CheckpointError(f"{file.path}: {name!r} has {stored.shape[0]} rows for {heads} heads", FOLDER)
    offset = architecture.norm_offset if architecture.is_offset(name) else 0.0
    is_packed, shape = _is_packed(name, stored), _part_shape(file, name, parts)
    dtype = torch.uint8 if is_packed else plain.DTYPES.get(stored.type.name, torch.float32)
    shape = (shape[0], stored.row_bytes) if is_packed else shape if shape[1:] or not is_router(name) else (1, *shape)

    def read() -> Tensor:
        blocks = file.blocks(name).view(parts, -1, stored.row_bytes)[part]
        is_dequantized = stored.type.name not in plain.DTYPES and not is_packed
        values = (dequantize(blocks, stored.type) if is_dequantized else blocks.view(dtype)).view(shape)
        values = values if heads is None else separated(values, heads)
        return values - offset if offset else values

    return LazyTensor(dtype, shape, stored.nbytes // parts, read)


def _part_shape(file: GGUFFile, name: str, parts: int) -> tuple[int, ...]:
    shape = file.tensors[name].shape
    rows = math.prod(shape[:-1])
    if rows % parts:
        raise CheckpointError(f"{file.path}: {name!r} has the shape {list(shape)} and no two equal halves", FOLDER)
    return (rows // parts, shape[-1]) if len(shape) == 3 else shape


def _is_packed(name: str, stored: StoredTensor) -> bool:
    """Whether a tensor is handed out as blocks of codes; routers are not."""
    return stored.type.scheme is not None and len(stored.shape) > 1 and not is_router(name)


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Returns config.json of a file.

    Raises:
        CheckpointError: an architecture that is not known, or metadata that are missing or contradict each other.
    """
    architecture = _check_whole(file)

    def vector(name: str) -> list[float] | None:
        return file.values(name).flatten().tolist() if name in file.tensors else None

    try:
        config = architecture.config(Source(architecture.name, file.metadata, vector, file.tensors))
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error.problem}", error.remedy) from error
    config |= {
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": _dtype(file),
    }
    types = _packed_types(file, architecture)
    return config | ({"quantization_config": {"quant_method": GGUF.name, "types": types}} if types else {})


def _packed_types(file: GGUFFile, architecture: Architecture) -> dict[str, str]:
    types = {}
    for name, stored in file.tensors.items():
        if _is_packed(name, stored):
            for published in architecture.published_names(name, stored.shape[0]):
                types[published.removesuffix(".weight")] = stored.type.name
    return types


def _dtype(file: GGUFFile) -> str:
    """Returns the dtype of activations: that of dense matrices where all are alike, else bfloat16."""
    matrices = {name: stored for name, stored in file.tensors.items() if len(stored.shape) > 1 and not is_router(name)}
    names = {stored.type.name for stored in matrices.values()}
    same = names.pop() if len(names) == 1 else ""
    return {"f32": "float32", "f16": "float16"}.get(same, "bfloat16")

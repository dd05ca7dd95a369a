"""A GGUF file: metadata, and tensors that are mapped into memory, after its counts, types and offsets are checked."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.gguf.metadata import Cursor, DamagedError, read_metadata
from compress.checkpoint.gguf.types import dequantize, find_type
from compress.checkpoint.gguf.types.base import BlockType
from compress.checkpoint.safetensors import FileMap
from compress.common.errors import CheckpointError
from compress.common.files import check_content, in_home

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
MAX_DIMENSIONS = 4
ENTRY_BYTES = 8 + 4 + 8 + 4 + 8
"""Bytes of the shortest entry of a tensor: length of its name, number of dimensions, one dimension, type, offset."""
AGAIN = "Copy or download this file again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The position of one tensor in the file.

    Attributes:
        type: of its blocks, which lie along the last dimension.
        shape: as in PyTorch, the last dimension is contiguous.
        begin: bytes from the start of the file.
    """

    type: BlockType
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.shape[-1])


@dataclass
class GGUFFile(FileMap):
    """A checked file.

    Attributes:
        metadata: values by key; arrays are lists.
        tensors: by the names in the file, in its order.
    """

    metadata: Mapping[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Reads and checks everything in front of the tensor data.

        Raises:
            CheckpointError: it is missing, no GGUF, truncated, of another version, or has tensors that overlap, leave
                the file, or are of a type that is not read.
        """
        file = in_home(path)
        if not file.is_file():
            raise CheckpointError(f"there is no file {file}", "Check the path")
        check_content(file)
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise CheckpointError(f"{file} is not a GGUF file: it does not begin with {MAGIC.decode()}", AGAIN)
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            with data, memoryview(data) as view:
                metadata, tensors = _read_header(Cursor(view, len(MAGIC)))
        except DamagedError as error:
            raise CheckpointError(f"{file} is not a valid GGUF file: {error}", AGAIN) from error
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error.problem}", error.remedy) from error
        return cls(file, metadata, tensors)

    def blocks(self, name: str) -> Tensor:
        """Returns the stored bytes of a tensor, uint8 `[..., bytes of a row]`, a view of the map."""
        stored = self.tensors[name]
        return self.tensor(stored.begin, torch.uint8, (*stored.shape[:-1], stored.row_bytes))

    def values(self, name: str) -> Tensor:
        """Returns the dequantized values of a tensor, float32."""
        stored = self.tensors[name]
        return dequantize(self.blocks(name).view(-1, stored.row_bytes), stored.type).view(stored.shape)


def _read_header(cursor: Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "a big-endian file" if swapped else f"version {version}"
        raise CheckpointError(f"{what} is not read, only little-endian of version 2 or 3", "Convert the model again")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = read_metadata(cursor, num_keys)
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise DamagedError(f"its alignment is {alignment!r}, not a power of two from 8 on")
    cursor.check_count(num_tensors, ENTRY_BYTES, "tensors")
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, kind, shape, offset in entries:
        if name in tensors:
            raise DamagedError(f"it names tensor {name!r} twice")
        if offset % alignment:
            raise DamagedError(f"{name!r} is at offset {offset}, which is not a multiple of {alignment}")
        tensors[name] = StoredTensor(kind, shape, start + offset)
    _check_places(tensors, cursor.size)
    return metadata, tensors


def _read_entry(cursor: Cursor) -> tuple[str, BlockType, tuple[int, ...], int]:
    name = cursor.text()
    if not name.isprintable() or not name:
        raise DamagedError(f"{name!r} is not a name that can be printed")
    count = cursor.number("I")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise DamagedError(f"{name!r} has {count} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.number("Q") for _ in range(count))[::-1]
    kind = find_type(cursor.number("I"))
    offset = cursor.number("Q")
    if 0 in shape or math.prod(shape) >= 2**60:
        raise DamagedError(f"{name!r} has the impossible shape {list(shape)}")
    if shape[-1] % kind.size:
        raise DamagedError(f"{name!r} has rows of {shape[-1]} values, not whole blocks of {kind.size} ({kind.name})")
    return name, kind, shape, offset


def _check_places(tensors: Mapping[str, StoredTensor], size: int) -> None:
    end, before = 0, ""
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].begin):
        if stored.begin < end:
            raise DamagedError(f"{name!r} overlaps {before!r}")
        end, before = stored.begin + stored.nbytes, name
        if end > size:
            raise DamagedError(f"it is truncated: {name!r} needs {end} bytes, the file has {size}")

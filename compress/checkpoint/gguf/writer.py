"""Writing of GGUF files: the header from shapes alone, then one tensor in memory at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.gguf.file import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC
from compress.checkpoint.gguf.metadata import metadata_bytes, text_bytes
from compress.checkpoint.gguf.types.base import BlockType
from compress.checkpoint.safetensors import tensor_bytes
from compress.common.files import atomic_file, check_space

VERSION = 3


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write.

    Attributes:
        shape: as in PyTorch.
        blocks: returns its bytes, uint8 of any shape.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    blocks: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> None:
    """Writes a file, which appears whole or not at all.

    Args:
        metadata: texts, numbers, booleans, and lists of one of them that are not empty.

    Raises:
        CheckpointError: the disk is full.
    """
    header = header_bytes(metadata, tensors)
    check_space(path.absolute().parent, len(header) + sum(_padded(tensor.nbytes) for tensor in tensors))
    with atomic_file(path) as stream:
        stream.write(header)
        for tensor in tensors:
            data = tensor_bytes(tensor.blocks())
            if len(data) != tensor.nbytes:
                raise ValueError(f"{tensor.name} has {len(data)} bytes, not {tensor.nbytes}")
            stream.write(data)
            stream.write(bytes(_padded(len(data)) - len(data)))


def header_bytes(metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> bytes:
    """Returns everything in front of the tensor data, padded to it."""
    pairs = {**metadata, ALIGNMENT_KEY: DEFAULT_ALIGNMENT}
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(pairs)), metadata_bytes(pairs)]
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts += [text_bytes(tensor.name), sizes, struct.pack("<IQ", tensor.type.code, offset)]
        offset += _padded(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(_padded(len(header)), b"\0")


def _padded(count: int) -> int:
    return -(-count // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT

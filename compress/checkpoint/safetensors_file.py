"""One safetensors file: a header that is believed only after checking, tensors that are views of a memory map.

The layout is 8 bytes of little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the
tensors back to back. Nothing in it can execute, and nothing in it is trusted: every offset is checked against the
dtype, the shape, its neighbours and the size of the file.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `[begin, end)` in bytes from the start of the tensor data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass
class MappedFile:
    """A checked safetensors file; the map is opened with the first tensor.

    Attributes:
        entries: tensors by name, in file order.
        metadata: the free-form strings of the header.
        data_start: bytes before the tensor data.
    """

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Reads and checks the header.

        Raises:
            CheckpointError: truncated, overlapping, of unknown dtype, or not safetensors at all.
        """
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise _broken(path, f"its first 8 bytes announce a header of {length} bytes, in a file of {size}")
            if 8 + length > size:
                raise _truncated(path, size, f"its header alone needs {8 + length}")
            header = _parse_json(path, stream.read(length))
        metadata = header.pop("__metadata__", {})
        entries = {name: _parse_entry(path, name, fields) for name, fields in header.items()}
        _check_layout(path, entries, size - 8 - length, size)
        ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
        return cls(path, ordered, metadata if isinstance(metadata, dict) else {}, 8 + length)

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> Tensor:
        """A view of the map (copied only where the file misaligns it). Treat it as read-only.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {name!r} among its {len(self.entries)} tensors")
        entry = self.entries[name]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        start = self.data_start + entry.begin
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=start)
        if start % entry.dtype.itemsize:
            data = data.clone()
        return data.view(entry.dtype).view(entry.shape)

    def release(self) -> None:
        """Gives the resident pages back to the system. Tensors stay valid: their bytes are read again when used."""
        mapped = self.__dict__.pop("_map", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def build_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Header bytes (with the length prefix) for tensors stored in the order of `tensors`, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def storage_order(tensors: Iterable[tuple[str, torch.dtype]]) -> list[str]:
    """Names in file order: widest dtype first keeps every tensor aligned, then by name so that bytes are determined."""
    return [name for name, _ in sorted(tensors, key=lambda item: (-item[1].itemsize, item[0]))]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a contiguous copy or of the tensor itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise _broken(path, "its header names a tensor twice")
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    return header


def _parse_entry(path: Path, name: str, fields: Any) -> TensorEntry:
    try:
        code, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the entry of {name!r} lacks dtype, shape or data_offsets") from error
    if code not in DTYPES:
        raise _broken(path, f"{name!r} has the unknown dtype {code!r}")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise _broken(path, f"{name!r} has shape {list(shape)} and offsets {[begin, end]}, which are not counts")
    if math.prod(max(size, 1) for size in shape) >= 2**63:
        raise _broken(path, f"{name!r} has the impossible shape {list(shape)}")
    needed = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != needed:
        raise _broken(path, f"{name!r} occupies {end - begin} bytes, but {code} {list(shape)} needs {needed}")
    return TensorEntry(DTYPES[code], shape, begin, end)


def _check_layout(path: Path, entries: dict[str, TensorEntry], available: int, size: int) -> None:
    """Tensors must tile the data exactly: no overlap, no gap, nothing past the end."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            relation = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise _broken(path, f"{name!r} at offset {entry.begin} {relation} (expected {position})")
        position = entry.end
    if position > available:
        raise _truncated(path, size, f"its header promises {size - available + position}")
    if position < available:
        raise _broken(path, f"{available - position} bytes after the last tensor belong to nothing")


def _truncated(path: Path, size: int, promise: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated: it has {size} bytes, {promise}", "Copy or download this file again")


def _broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a valid safetensors file: {reason}", "Copy or download this file again")

"""Mapping from tensor names to memory-mapped tensors of a Hugging Face model folder."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.config import CONFIG_FILE
from compress.checkpoint.locate.file_names import (
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    WITHOUT_VALUES,
    is_weight,
    only_pickles,
)
from compress.common.errors import CheckpointError
from compress.common.files import PARTIAL_SUFFIX, check_content, read_json
from compress.common.model_folder import GGUF_SUFFIX, find_folder, no_file
from compress.models.wrappers import StoredNames

if TYPE_CHECKING:
    from compress.checkpoint.reader import PackedCheckpoint
    from compress.checkpoint.scheme import Scheme

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
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
PREFIX_BYTES = 8
"""Bytes of the header's length."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read when it is asked for.

    Attributes:
        nbytes: of what is stored.
        read: returns it; treat it as read-only, since it may be a view of a memory map.
        place: its file, and its first byte there, where it is stored as it is handed out; None for others.
        scheme: form of what is stored, where reading dequantizes it and changes nothing else.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Tensor]
    place: tuple[Path, int] | None = None
    scheme: Scheme | None = None


class Memory(Protocol):
    """Source of the bytes of a file of weights."""

    @property
    def file_bytes(self) -> int:
        """Bytes on disk."""

    def release(self) -> None:
        """Releases resident pages to the system. Tensors stay valid: their bytes are read again when used."""


@dataclass
class FileMap:
    """The memory map of a file, which is opened with the first tensor."""

    path: Path

    @cached_property
    def map(self) -> mmap.mmap:
        with self.path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def file_bytes(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Returns a view of the map, copied only if misaligned."""
        if not (nbytes := math.prod(shape) * dtype.itemsize):
            return torch.empty(shape, dtype=dtype)
        data = torch.frombuffer(self.map, dtype=torch.uint8, count=nbytes, offset=start)
        if start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    def release(self) -> None:
        """Releases resident pages to the system. Tensors stay valid: their bytes are read again when used."""
        # The map is kept: those of tensors that are still in use are given back the next time.
        if "map" in vars(self) and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class MappedFile:
    """A checked file of weights.

    Attributes:
        entries: tensors by name, in file order.
        memory: where they are read from.
        metadata: the free-form strings of the header.
        notes: a line for everything in which what is handed out differs from what is stored.
    """

    path: Path
    entries: dict[str, LazyTensor]
    memory: Memory
    metadata: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path, memory: FileMap | None = None) -> MappedFile:
        """Reads and checks the header of a safetensors file.

        Args:
            memory: holds all bytes of the file; a memory map without it.

        Raises:
            CheckpointError: truncated, overlapping, of unknown dtype, or not safetensors at all.
        """
        check_content(path)
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
        metadata, memory = metadata if isinstance(metadata, dict) else {}, memory or FileMap(path)
        found = {name: _parse_entry(path, name, fields) for name, fields in header.items()}
        ordered = sorted(found, key=lambda name: (found[name].begin, found[name].end))
        _check_layout(path, {name: found[name] for name in ordered}, size - 8 - length, size)
        entries = {name: found[name].lazy(memory, 8 + length, WITHOUT_VALUES not in metadata) for name in ordered}
        return cls(path, entries, memory, metadata)

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor; those of a file without values are on the device `meta`. Raises CheckpointError if there is
        none of this name."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {name!r} among its {len(self.entries)} tensors")
        return self.entries[name].read()


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str], size: int = 0
) -> bytes:
    """Returns header bytes (with the length prefix) for tensors in the order of `tensors`, padded to 8 bytes and to at
    least `size` bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(size - PREFIX_BYTES)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def storage_order(tensors: Iterable[tuple[str, torch.dtype]]) -> list[str]:
    """Names in file order: widest dtype first keeps every tensor aligned, then by name so that bytes are determined."""
    return [name for name, _ in sorted(tensors, key=lambda item: (-item[1].itemsize, item[0]))]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the raw bytes of the tensor, or of a contiguous copy."""
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """The position of one tensor: `[begin, end)` in bytes from the start of the tensor data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def lazy(self, memory: FileMap, data_start: int, has_values: bool) -> LazyTensor:
        start = data_start + self.begin
        read = partial(memory.tensor, start, self.dtype, self.shape)
        if not has_values:
            read = partial(torch.empty, self.shape, dtype=self.dtype, device="meta")
        return LazyTensor(self.dtype, self.shape, self.end - self.begin, read, (memory.path, start))


def _parse_entry(path: Path, name: str, fields: Any) -> _Entry:
    try:
        code, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the entry of {name!r} lacks dtype, shape or data_offsets") from error
    if not name.isprintable():
        raise _broken(path, f"{name!r} is not a printable name")
    if not isinstance(code, str) or code not in DTYPES:
        raise _broken(path, f"{name!r} has the unknown dtype {code!r}")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise _broken(path, f"{name!r} has shape {list(shape)} and offsets {[begin, end]}, which are not counts")
    if math.prod(max(size, 1) for size in shape) >= 2**63:
        raise _broken(path, f"{name!r} has the impossible shape {list(shape)}")
    needed = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != needed:
        raise _broken(path, f"{name!r} occupies {end - begin} bytes, but {code} {list(shape)} needs {needed}")
    return _Entry(DTYPES[code], shape, begin, end)


def _check_layout(path: Path, entries: Mapping[str, _Entry], available: int, size: int) -> None:
    """Refuses tensors that do not tile the data exactly, in the order of `entries`: overlaps, gaps, other lengths."""
    position = 0
    for name, entry in entries.items():
        if entry.begin != position:
            relation = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise _broken(path, f"{name!r} at offset {entry.begin} {relation} (expected {position})")
        position = entry.end
    if position > available:
        raise _truncated(path, size, f"its header promises {size - available + position}")
    if position < available:
        raise _broken(path, f"{available - position} bytes after the last tensor belong to no tensor")


def _truncated(path: Path, size: int, promise: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated: it has {size} bytes, {promise}", "Copy or download this file again")


def _broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a valid safetensors file: {reason}", "Copy or download this file again")


@dataclass(frozen=True, eq=False)
class TensorFiles:
    """The tensors of a folder (one file, or an index with shards) by name, read only when asked for.

    Functions that show tensors by other names, in parts or with other values return one with other `tensors`.

    Attributes:
        path: the folder.
        files: the files of weights in name order.
        text_names: how the tensors of the text model are stored, where that is not by its own names.
        notes: lines on what becomes of stored tensors when they are read.
        packed: the checkpoint as stored, where reading dequantizes its weights.
        folded: names of the transforms in config.json that are folded into weights when these are read.
    """

    path: Path
    files: list[MappedFile]
    tensors: Mapping[str, LazyTensor]
    text_names: StoredNames | None = None
    notes: tuple[str, ...] = ()
    packed: PackedCheckpoint | None = None
    folded: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> TensorFiles:
        """Finds and checks the weight files; reads headers only.

        Raises:
            CheckpointError: no such folder, only pickle files, missing or truncated shards, an index that leaves the
                folder or names a tensor its shard lacks, or one tensor in two shards.
        """
        folder = find_folder(path)
        names, index = _weight_files(folder)
        files = [_open_file(folder / name) for name in names]
        owner: dict[str, MappedFile] = {}
        for file in files:
            for name in file.entries:
                if name in owner:
                    raise CheckpointError(
                        f"tensor {name!r} is stored twice in {folder}: in {owner[name].path.name} and {file.path.name}",
                        "Remove the shard that does not belong to this model",
                    )
                owner[name] = file
        if not owner:
            raise CheckpointError(f"the weight files of {folder} hold no tensor", "Download them again")
        for name, file_name in index.items():
            if name not in owner or owner[name].path.name != file_name:
                raise CheckpointError(
                    f"{folder / INDEX_FILE} places {name!r} in {file_name}, which does not hold it",
                    "Download the index and its shards again, from one revision",
                )
        tensors = {name: file.entries[name] for name, file in owner.items()}
        return cls(folder, files, tensors, notes=tuple(note for file in files for note in file.notes))

    @property
    def other_parts(self) -> frozenset[str]:
        """Names of the tensors of a multimodal model that are not of its text model."""
        return self.text_names.others if self.text_names else frozenset()

    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, name: str) -> LazyTensor:
        """Finds a tensor. Raises CheckpointError if there is none of this name."""
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r} among its {len(self)} tensors",
                "Check that config.json and the weights belong to the same model",
            )
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def tensor_nbytes(self, name: str) -> int:
        """Returns the stored bytes; those of codes and scales for a quantized weight."""
        return self[name].nbytes

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor; clone it before modifying it."""
        return self[name].read()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of the weight files on disk."""
        return sum(file.memory.file_bytes for file in self.files)

    def release(self) -> None:
        """Gives resident pages back to the system, so that streaming through a big model stays small. Tensors handed
        out before stay valid: their bytes are read again when used."""
        for file in self.files:
            file.memory.release()

    def side_files(self) -> list[Path]:
        """Everything that is not a weight, an index of weights or hidden: config, tokenizer, templates, code, notes.
        Folders with weights of their own are other checkpoints, as one that was written here is, or is being written.
        """
        return sorted(_side_files(self.path))


def renamed(files: TensorFiles, name_of: Callable[[str], str], layout: StoredNames | None) -> TensorFiles:
    """Returns the same tensors by other names; `layout` as `text_names`."""
    return replace(files, tensors={name_of(name): tensor for name, tensor in files.tensors.items()}, text_names=layout)


def _open_file(path: Path) -> MappedFile:
    if path.suffix != GGUF_SUFFIX:
        return MappedFile.open(path)
    from compress.checkpoint.gguf.tensors import open_gguf

    return open_gguf(path)


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns file names in order, and the index (empty for a single file). A single file takes precedence, as in
    transformers."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE], {}
    if (folder / INDEX_FILE).is_file():
        index = _read_index(folder)
        return sorted(set(index.values())), index
    found = sorted(file.name for file in folder.glob("*.safetensors") if file.is_file())
    if len(found) == 1:
        return found, {}
    if found:
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files but no {INDEX_FILE}", "Download the index file too"
        )
    if len(files := sorted(folder.glob(f"*{GGUF_SUFFIX}"))) == 1 and (folder / CONFIG_FILE).is_file():
        return [files[0].name], {}
    raise _no_weights(folder)


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    try:
        weight_map: dict[str, str] = read_json(path)["weight_map"]
        valid = all(isinstance(name, str) for name in weight_map.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a valid index: {error!r}", "Download this file again") from error
    if not valid or not weight_map:
        raise CheckpointError(f"{path} has no usable weight_map", "Download this file again")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or name in ("..", ".") or "\\" in name:
            raise CheckpointError(f"{path} points outside of its folder: {name!r}", "Do not use this checkpoint")
        if not (folder / name).is_file():
            raise CheckpointError(f"shard {name} of {folder} is missing", "Download it again, or finish the download")
    return weight_map


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if not pickles and (files := sorted(folder.glob(f"*{GGUF_SUFFIX}"))):
        return CheckpointError(f"{folder} holds no safetensors weights", f"Name the file itself, {files[0]}")
    if not pickles:
        return no_file(folder / SINGLE_FILE, "Name a folder that holds the model's safetensors files")
    return only_pickles(str(folder), pickles[0], f"{folder}-safetensors")


def _side_files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith(".") or is_weight(entry.name):
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.is_symlink() and not _is_other_checkpoint(entry):
            yield from _side_files(entry)


def _is_other_checkpoint(folder: Path) -> bool:
    return folder.name.endswith(PARTIAL_SUFFIX) or any(folder.glob("*.safetensors"))

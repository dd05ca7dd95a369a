"""Prepared weights: linears in the layout of their kernels, written once and mapped at every start.

A safetensors file holds the tensors of each linear as `<modules>.<name>`. Its metadata hold the key, of each linear
layout, shape, bits and group, the SHA-256 of the tensors' bytes, and that of the header without itself.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import FileMap, MappedFile, build_header, tensor_bytes
from compress.common.errors import CheckpointError, ToolkitError
from compress.common.files import atomic_file
from compress.cpu.binding import library
from runtime.backends.base import Linear
from runtime.backends.cpu.huge_pages import map_file
from runtime.backends.prepared_weight import LAYOUT_VERSION, Layout, Preparable, PreparedWeight
from runtime.model.device_files import DeviceReader
from runtime.model.prepared_key import CPU, PreparedKey, digest_of, places

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

KEY, LINEARS, DATA_DIGEST, HEADER_DIGEST = "prepared", "linears", "data_sha256", "header_sha256"
"""Names of metadata."""
ALIGNMENT = 4096
HEADER_BYTES_PER_TENSOR = 1024
NAME_SEPARATOR = "+"


@dataclass(frozen=True)
class NoPrepared:
    """No prepared weights: every linear is packed.

    Attributes:
        note: for people; "" for nothing to say.
    """

    note: str = field(default="", kw_only=True)

    def find(self, modules: Sequence[str], layout: Layout | None) -> PreparedWeight | None:
        """Returns the prepared weight of one linear of several modules, in a layout; None where there is none."""
        return None

    def keep(self, modules: Sequence[str], layout: Layout | None, linear: Linear, bias: Tensor | None) -> Linear:
        """Takes a linear that was packed, with its bias, and returns the one to use."""
        return linear


NOTHING_PREPARED = NoPrepared()


@dataclass(frozen=True)
class StoredLinear:
    """Entry of a linear in the metadata; `tensors` are names of its layout."""

    layout: str
    shape: tuple[int, int]
    bits: int
    group: int
    tensors: tuple[str, ...]

    @classmethod
    def read(cls, fields: Any) -> StoredLinear:
        rows, columns = map(int, fields["shape"])
        bits, group, names = int(fields["bits"]), int(fields["group"]), tuple(map(str, fields["tensors"]))
        return cls(str(fields["layout"]), (rows, columns), bits, group, names)


@dataclass(frozen=True)
class PreparedFile(NoPrepared):
    """A file whose header was checked: key, sizes and digest. Its tensors are views of a memory map."""

    file: MappedFile
    linears: dict[str, StoredLinear]
    key: PreparedKey
    device_reader: DeviceReader | None = None

    @classmethod
    def open(
        cls, path: Path, checkpoint: Path, device: str = CPU, device_reader: DeviceReader | None = None
    ) -> PreparedFile:
        """Opens the file at `path`.

        Args:
            device: kind of device that it is for.
            device_reader: reads tensors into the memory of a device; None maps them.

        Raises:
            CheckpointError: it is none, is truncated, has a header that was changed, or belongs to another checkpoint,
                machine or version.
        """
        memory = FileMap(path)
        file = MappedFile.open(path, memory)
        if file.metadata.get(HEADER_DIGEST) != header_digest(_dtypes_and_shapes(file), file.metadata):
            raise CheckpointError("its header is not what was written", "Run runtime prepare again")
        key = PreparedKey.read(_parsed(file, KEY))
        if mismatch := key.mismatch(checkpoint, PreparedKey.of(checkpoint, LAYOUT_VERSION, device)):
            raise CheckpointError(mismatch, "Run runtime prepare again")
        linears = _linears(file)
        note = f"prepared: {len(linears)} weights are {'mapped' if device_reader is None else 'read'} from {path}"
        if device_reader is None:
            memory.map = map_file(path)
        return cls(file, linears, key, device_reader, note=note)

    def check(self, checkpoint: Path) -> None:
        """Reads all bytes of the file and of its checkpoint, about a second for each gigabyte.

        Raises:
            CheckpointError: they are not those that were there when it was written.
        """
        if _data_digest(self.file.tensor(name) for name in self.file.entries) != self.file.metadata.get(DATA_DIGEST):
            raise CheckpointError("bytes of its weights are not what was written", "Run runtime prepare again")
        if self.key.digest != digest_of(checkpoint):
            raise CheckpointError("the checkpoint has changed since it was prepared", "Run runtime prepare again")

    def find(self, modules: Sequence[str], layout: Layout | None) -> PreparedWeight | None:
        name = NAME_SEPARATOR.join(modules)
        stored = self.linears.get(name)
        if stored is None or layout is None or layout.name != stored.layout:
            return None
        tensors = {own: self._tensor(f"{name}.{own}") for own in stored.tensors}
        return PreparedWeight(stored.shape, tensors, stored.bits, stored.group)

    def _tensor(self, name: str) -> Tensor:
        if self.device_reader is None:
            return self.file.tensor(name)
        return self.device_reader.tensor(self.file.entries[name])


def _data_digest(tensors: Iterable[Tensor]) -> str:
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def header_digest(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and strings of metadata, this digest left out."""
    strings = sorted((name, text) for name, text in metadata.items() if isinstance(text, str) and name != HEADER_DIGEST)
    described = [(name, str(dtype), shape) for name, (dtype, shape) in tensors.items()]
    return sha256(json.dumps([described, strings]).encode()).hexdigest()


def _dtypes_and_shapes(file: MappedFile) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns dtype and shape of each tensor, in file order, on which offsets depend."""
    return {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}


def _parsed(file: MappedFile, name: str) -> Any:
    """Returns a part of the metadata. Raises CheckpointError where it is not JSON."""
    try:
        return json.loads(file.metadata[name])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its metadata lack {name!r}", "Run runtime prepare again") from error


def _linears(file: MappedFile) -> dict[str, StoredLinear]:
    try:
        return {name: StoredLinear.read(fields) for name, fields in _parsed(file, LINEARS).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"its linears cannot be read ({error!r})", "Run runtime prepare again") from error


@dataclass(frozen=True)
class PreparedWriter(NoPrepared):
    """Writes every linear as soon as it is packed. On a CPU it hands out what is written in its place: so memory stays
    small.

    Attributes:
        stream: of the new file.
        room: bytes for the header.
        digest: of what is written after the header.
    """

    stream: BinaryIO
    room: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    linears: dict[str, StoredLinear] = field(default_factory=dict)
    digest: Hash = field(default_factory=sha256)

    def keep(self, modules: Sequence[str], layout: Layout | None, linear: Linear, bias: Tensor | None) -> Linear:
        name = NAME_SEPARATOR.join(modules)
        if not modules or layout is None or name in self.linears or not isinstance(linear, Preparable):
            return linear
        weight = linear.prepared()
        self.linears[name] = StoredLinear(layout.name, weight.shape, weight.bits, weight.group, tuple(weight.tensors))
        mapped = {own: self._write(f"{name}.{own}", tensor) for own, tensor in weight.tensors.items()}
        is_on_cpu = all(tensor.device.type == CPU for tensor in weight.tensors.values())
        return layout.restore(replace(weight, tensors=mapped), bias) if is_on_cpu else linear

    def _write(self, name: str, tensor: Tensor) -> Tensor:
        """Appends a tensor and returns a view of its bytes in the file."""
        self.tensors[name] = tensor.dtype, tuple(tensor.shape)
        start, content = self.stream.tell(), tensor_bytes(tensor.cpu())
        self.stream.write(content)
        self.digest.update(content)
        self.stream.flush()
        first = start - start % mmap.ALLOCATIONGRANULARITY
        with Path(self.stream.name).open("rb") as written:
            memory = mmap.mmap(written.fileno(), start + tensor.nbytes - first, access=mmap.ACCESS_COPY, offset=first)
        mapped = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start - first)
        return mapped.view(tensor.shape)

    def finish(self, key: PreparedKey) -> None:
        """Writes the header in front of the data. Raises ToolkitError when there is no room for it."""
        linears = {name: asdict(stored) for name, stored in self.linears.items()}
        metadata = {KEY: json.dumps(key.fields()), LINEARS: json.dumps(linears), DATA_DIGEST: self.digest.hexdigest()}
        metadata[HEADER_DIGEST] = header_digest(self.tensors, metadata)
        header = build_header(self.tensors, metadata, self.room)
        if len(header) > self.room:
            raise ToolkitError(f"a header of {len(header)} bytes has room for {self.room}", "Report this model")
        self.stream.seek(0)
        self.stream.write(header)


@contextmanager
def writing(path: Path, checkpoint: PackedCheckpoint, device: str = CPU) -> Iterator[PreparedWriter]:
    """Makes the file at `path` of the linears that are packed in the block; it appears whole or not at all.

    Args:
        device: kind of device whose kernels they are for.

    Raises:
        CheckpointError: the disk is full.
    """
    key = PreparedKey.of(checkpoint.path, LAYOUT_VERSION, device)
    needed = HEADER_BYTES_PER_TENSOR * (1 + len(checkpoint.files))
    room = needed + -needed % ALIGNMENT
    with atomic_file(path) as stream:
        stream.write(bytes(room))
        writer = PreparedWriter(stream, room)
        yield writer
        writer.finish(replace(key, digest=digest_of(checkpoint.path)))


def find_prepared(checkpoint: Path, device: str = CPU, device_reader: DeviceReader | None = None) -> NoPrepared:
    """Finds the prepared weights of a checkpoint for a kind of device of this machine. Nothing that is wrong with them
    is an error."""
    if device == CPU and library() is None:
        return NOTHING_PREPARED
    reasons = []
    for path in places(checkpoint, device):
        try:
            if path.is_file():
                return PreparedFile.open(path, checkpoint, device, device_reader)
        except CheckpointError as error:
            reasons.append(f"{path} is not used: {error.problem}")
        except OSError as error:
            reasons.append(f"{path} cannot be read: {error.strerror}")
    return NoPrepared(note=f"prepared: weights are packed again; {'; '.join(reasons)}") if reasons else NOTHING_PREPARED

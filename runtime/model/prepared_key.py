"""Where the prepared weights of a checkpoint are, and whether they belong to it and to this machine. No torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.common.errors import CheckpointError
from compress.common.files import cache_folder as user_cache
from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set

FOLDER = "prepared"
"""Inside of a checkpoint: a folder, since other engines read all safetensors files next to config.json."""
READ_BYTES = 1 << 20


CPU, CUDA = "cpu", "cuda"
"""Kinds of devices with kernels whose layouts files keep."""


def processor_of(device: str) -> str:
    """Returns the instruction set of this CPU, or the name of another kind of device."""
    return INSTRUCTION_SETS[best_instruction_set()] if device == CPU else device


@dataclass(frozen=True, slots=True)
class PreparedKey:
    """Checkpoint, kind of processor and layout that prepared weights depend on.

    Attributes:
        layout: version of the memory layout.
        instruction_set: of the CPU; `cuda` for NVIDIA GPUs, whose kernels share one layout.
        files: size in bytes and time of the last change in nanoseconds of config.json and all weight files, by name.
        digest: SHA-256 of these files; "" where it was not computed.
    """

    layout: int
    instruction_set: str
    files: dict[str, tuple[int, int]]
    digest: str = ""

    @classmethod
    def of(cls, checkpoint: Path, layout: int, device: str = CPU) -> PreparedKey:
        """Returns the key of a checkpoint on a kind of device of this machine, without its digest."""
        stats = {file.name: file.stat() for file in weight_files(checkpoint)}
        files = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
        return cls(layout, processor_of(device), files)

    @classmethod
    def read(cls, fields: Any) -> PreparedKey:
        """Returns the key of JSON. Raises CheckpointError for other fields."""
        try:
            files = {str(name): (int(size), int(changed)) for name, (size, changed) in fields["files"].items()}
            return cls(int(fields["layout"]), str(fields["instruction_set"]), files, str(fields["digest"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"its key cannot be read ({error!r})", "Run runtime prepare again") from error

    def fields(self) -> dict[str, Any]:
        """Returns what JSON keeps."""
        return asdict(self)

    def mismatch(self, checkpoint: Path, here: PreparedKey) -> str:
        """Why weights with this key do not serve a checkpoint whose key is `here`; "" when they do.

        The digest of the files is computed only where their times differ, as those of a copy do.
        """
        if self.layout != here.layout:
            return f"it has layout {self.layout}, and this version reads {here.layout}"
        if self.instruction_set != here.instruction_set:
            return f"it was prepared for {self.instruction_set}, and this machine has {here.instruction_set}"
        sizes, here_sizes = _sizes(self.files), _sizes(here.files)
        if sizes != here_sizes:
            name = min(name for name, _ in sizes.items() ^ here_sizes.items())
            return f"{name} has {here_sizes.get(name, 0)} bytes, and had {sizes.get(name, 0)} when it was prepared"
        if self.files != here.files and self.digest != digest_of(checkpoint):
            return "the checkpoint has changed since it was prepared"
        return ""


def _sizes(files: dict[str, tuple[int, int]]) -> dict[str, int]:
    return {name: size for name, (size, _) in files.items()}


def weight_files(checkpoint: Path) -> list[Path]:
    """Returns the files on which prepared weights depend."""
    weights = (file for pattern in ("*.safetensors", "*.index.json", "*.gguf") for file in checkpoint.glob(pattern))
    return sorted([checkpoint / "config.json", *weights])


def digest_of(checkpoint: Path) -> str:
    """Hashes names and bytes of all weight files, about a second for each gigabyte."""
    digest = hashlib.sha256()
    for file in weight_files(checkpoint):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while part := stream.read(READ_BYTES):
                digest.update(part)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Returns the folder for prepared weights of checkpoints that cannot be written to."""
    return user_cache(FOLDER)


def places(checkpoint: Path, device: str = CPU) -> tuple[Path, Path]:
    """Returns the files that may hold the prepared weights of a checkpoint for a kind of device: inside of it, and in
    the cache folder."""
    name, path = f"{processor_of(device)}.safetensors", checkpoint.resolve()
    own = f"{path.name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    return checkpoint / FOLDER / name, cache_folder() / own / name

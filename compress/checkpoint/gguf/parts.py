"""Models that were split into several files, NAME-00001-of-00003.gguf and so on, read as one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compress.checkpoint.gguf.file import AGAIN, GGUFFile
from compress.checkpoint.locate.file_names import part_names, part_paths
from compress.common.errors import CheckpointError
from compress.common.files import in_home

COUNT_KEY, NUMBER_KEY, TENSORS_KEY = "split.count", "split.no", "split.tensors.count"
"""Keys with the number of parts, that of a part, from 0 on, and the number of tensors of all parts."""


@dataclass
class SplitFile(GGUFFile):
    """All parts of a model, under the path and the metadata of the first.

    Attributes:
        tensors: of all parts; their positions are those in their part.
        owners: part of each tensor, by name.
        parts: in their order.
    """

    owners: dict[str, GGUFFile]
    parts: tuple[GGUFFile, ...]

    def blocks(self, name: str) -> Tensor:
        return self.owners[name].blocks(name)

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in self.parts)

    def release(self) -> None:
        for part in self.parts:
            part.release()


def _followed(path: Path) -> Path:
    """Follows links until a name is that of a part: those of the hub's cache lead to files with other names."""
    while part_names(path.name) is None and path.is_symlink():
        path = path.parent / path.readlink()
    return path


def open_parts(path: str | Path) -> GGUFFile:
    """Reads and checks a file, and all other parts of a model of which it is the first.

    Raises:
        CheckpointError: see `GGUFFile.open` and `part_paths`; parts of different models, or tensors that are missing.
    """
    first = GGUFFile.open(path)
    count = first.metadata.get(COUNT_KEY, 1)
    if count in (0, 1):
        return first
    paths = part_paths(_followed(in_home(path)))
    if len(paths) != count:
        remedy = f"Name it NAME-00001-of-{count:05}.gguf" if type(count) is int else AGAIN
        raise CheckpointError(f"{first.path} is one of {count!r} parts, and its name says {len(paths)}", remedy)
    parts = (first, *(GGUFFile.open(each) for each in paths[1:]))
    for number, part in enumerate(parts):
        said = part.metadata.get(NUMBER_KEY), part.metadata.get(COUNT_KEY)
        if said != (number, count):
            raise CheckpointError(f"{part.path} says it is part {said[0]!r} from 0 on, of {said[1]!r}", AGAIN)
    owners = {name: part for part in parts for name in part.tensors}
    stored = sum(len(part.tensors) for part in parts)
    if len(owners) != stored or first.metadata.get(TENSORS_KEY, stored) != stored:
        problem = f"{first.path} announces {first.metadata.get(TENSORS_KEY)!r} tensors, its parts have {len(owners)}"
        raise CheckpointError(problem, AGAIN)
    tensors = {name: part.tensors[name] for name, part in owners.items()}
    return SplitFile(first.path, first.metadata, tensors, owners, parts)

"""Containers that can hold a packed checkpoint, and the engines that load them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compress.checkpoint.formats import FORMATS, Format
from compress.checkpoint.formats.readers import READERS, Reader, readers
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.writer import described
from compress.common.errors import CheckpointError, SchemeError


@dataclass(frozen=True, slots=True)
class Container:
    """A format that a checkpoint may be exported to.

    Attributes:
        refusal: reason why it cannot hold the checkpoint's forms, and the nearest possible form; empty if it can.
        readers: engines that read the container, with what they do with the result.
    """

    format: str
    refusal: str
    readers: tuple[Reader, ...]


def containers(path: str | Path) -> list[Container]:
    """Returns every writable format, with its support for the checkpoint at `path`. Whether scales are exact
    in the dtype of another tool shows when they are written, except in GGUF.

    Raises:
        CheckpointError: `path` cannot be read, or is not packed.
    """
    packed = PackedCheckpoint.open(path)
    if not packed.schemes:
        raise CheckpointError(f"{packed.path} holds no quantized weights", "Quantize it first: compress quantize MODEL")
    for module in packed.modules:  # what is missing is no refusal of a format
        packed.shape(module)
    return [_container(packed, name) for name in READERS]


def _container(packed: PackedCheckpoint, name: str) -> Container:
    check = CHECKS.get(name) or partial(_check, FORMATS[name])
    try:
        check(packed)
    except (CheckpointError, SchemeError) as error:
        return Container(name, str(error), ())
    return Container(name, "", tuple(readers(name, packed.config, packed.schemes.values())))


def _check(codec: Format, packed: PackedCheckpoint) -> None:
    described(packed, codec)


def _check_gguf(packed: PackedCheckpoint) -> None:
    """Raises CheckpointError or SchemeError if codes would have to be rounded again."""
    from compress.checkpoint.gguf.export import Planner
    from compress.checkpoint.gguf.model_metadata import architecture_of

    deque(Planner(packed, architecture_of(packed.config)).tensors(), maxlen=0)


CHECKS: dict[str, Callable[[PackedCheckpoint], None]] = {"gguf": _check_gguf}
"""Checks of containers other than folders of tensors, by name."""

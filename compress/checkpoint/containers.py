"""Containers that can hold a packed checkpoint, and the engines that load them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from compress.checkpoint.formats.base import CONTAINERS, Container
from compress.checkpoint.formats.gguf import GGUF
from compress.checkpoint.formats.readers import Reader, readers
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.writer import described
from compress.common.errors import CheckpointError, SchemeError


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """A format that a checkpoint may be exported to.

    Attributes:
        refusal: reason why it cannot hold the checkpoint's forms, and the nearest possible form; empty if it can.
        readers: engines that read the container, with what they do with the result.
    """

    format: str
    refusal: str
    readers: tuple[Reader, ...]


def containers(path: str | Path) -> list[ExportChoice]:
    """Returns every writable container, with its support for the checkpoint at `path`. Whether scales are exact
    in the dtype of another tool shows when they are written, except in GGUF.

    Raises:
        CheckpointError: `path` cannot be read, or is not packed.
    """
    packed = PackedCheckpoint.open(path)
    if not packed.schemes:
        raise CheckpointError(f"{packed.path} holds no quantized weights", "Quantize it first: compress quantize MODEL")
    for module in packed.modules:  # missing tensors are an error, not a refusal by a container
        packed.shape(module)
    return [_choice(packed, container) for container in CONTAINERS.values() if container.is_written]


def _choice(packed: PackedCheckpoint, container: Container) -> ExportChoice:
    try:
        if container is GGUF:
            from compress.checkpoint.gguf.export import Planner
            from compress.checkpoint.gguf.model_metadata import architecture_of

            deque(Planner(packed, architecture_of(packed.config)).tensors(), maxlen=0)
        else:
            described(packed, container)
    except (CheckpointError, SchemeError) as error:
        return ExportChoice(container.name, str(error), ())
    return ExportChoice(container.name, "", tuple(readers(container.name, packed.config, packed.schemes.values())))

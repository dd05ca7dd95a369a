"""The architectures that are read; those that are alike share a file with a tuple `ARCHITECTURES`."""

from __future__ import annotations

from compress.checkpoint.gguf.architectures import gemma, llama, phi3, qwen
from compress.checkpoint.gguf.architectures.base import Architecture, Metadata
from compress.common.errors import CheckpointError

ALL = (*llama.ARCHITECTURES, *qwen.ARCHITECTURES, *gemma.ARCHITECTURES, *phi3.ARCHITECTURES)
BY_NAME = {each.name: each for each in ALL}
BY_MODEL_TYPE = {model_type: each for each in ALL for model_type in each.model_types}


def find_architecture(metadata: Metadata) -> Architecture:
    """Returns the architecture of a file. Raises CheckpointError for one that is not read."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in BY_NAME:
        raise CheckpointError(
            f"GGUF files of architecture {name!r} are not read, only {', '.join(BY_NAME)}",
            "Name the model's safetensors folder",
        )
    return BY_NAME[name]

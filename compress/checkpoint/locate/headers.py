"""Folders with the headers of a model's weights, read from the hub by ranges of bytes. Does not import torch."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from compress.checkpoint.config import compression_block, quantization_block, read_config
from compress.checkpoint.locate.file_names import SAFETENSORS_SUFFIX, WITHOUT_VALUES
from compress.common.errors import CheckpointError
from compress.common.files import atomic_file, cache_folder
from compress.common.model_folder import HUB_FOLDER


def headers_folder(repo: str, commit: str, names: Sequence[str]) -> Path | None:
    """Returns a folder with the files of a model, its weights without values: these files take no space after their
    headers.

    Args:
        names: files to read, safetensors files among them.

    Returns:
        None for quantized weights, some of whose shapes are values, and if all weights are in the cache.

    Raises:
        CheckpointError: a file is not a safetensors file.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    weights = [name for name in names if name.endswith(SAFETENSORS_SUFFIX)]
    if all(isinstance(try_to_load_from_cache(repo, name, revision=commit), str) for name in weights):
        return None
    folder = cache_folder("headers") / f"{HUB_FOLDER}{repo.replace('/', '--')}" / "snapshots" / commit
    for name in names:
        if name not in weights:
            _link(folder / name, Path(hf_hub_download(repo, name, revision=commit)))
    config = read_config(folder)
    if quantization_block(config) or compression_block(config):
        return None
    missing = [name for name in weights if not (folder / name).is_file()]
    if missing:
        print(f"reading the headers of {len(missing)} files of {repo}, not the weights", file=sys.stderr, flush=True)
    for name in missing:
        _write_header(folder / name, repo, commit)
    return folder


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _write_header(path: Path, repo: str, commit: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    try:
        found = HfApi().parse_safetensors_file_metadata(repo, path.name, revision=commit)
    except SafetensorsParsingError as error:
        raise CheckpointError(f"{path.name} of {repo} is not a valid safetensors file", "Name another model") from error
    header: dict[str, object] = {"__metadata__": {WITHOUT_VALUES: commit}}
    for name, entry in found.tensors.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": entry.data_offsets}
    text = json.dumps(header).encode()
    end = max((entry.data_offsets[1] for entry in found.tensors.values()), default=0)
    with atomic_file(path) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)

"""A Hugging Face model folder as one mapping from tensor names to memory-mapped tensors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.disk import PARTIAL_SUFFIX
from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.safetensors_file import MappedFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
WEIGHT_SUFFIXES = PICKLE_SUFFIXES | {
    ".safetensors",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".npy",
    ".ot",
    ".tflite",
}


@dataclass
class TensorFiles:
    """Every tensor of a folder (one file, or an index with shards), read only when asked for.

    Attributes:
        path: the folder.
        files: the safetensors files in name order.
    """

    path: Path
    files: list[MappedFile]
    _owner: dict[str, MappedFile]

    @classmethod
    def open(cls, path: str | Path) -> TensorFiles:
        """Finds and checks the weight files; reads headers only.

        Raises:
            CheckpointError: no such folder, only pickle files, missing or truncated shards, an index that leaves the
                folder or names a tensor its shard lacks, or one tensor in two shards.
        """
        folder = check_folder(path)
        names, index = _weight_files(folder)
        files = [MappedFile.open(folder / name) for name in names]
        owner: dict[str, MappedFile] = {}
        for file in files:
            for name in file.entries:
                if name in owner:
                    raise CheckpointError(
                        f"tensor {name!r} is stored twice in {folder}: in {owner[name].path.name} and {file.path.name}",
                        "Remove the shard that does not belong to this model",
                    )
                owner[name] = file
        for name, file_name in index.items():
            if name not in owner or owner[name].path.name != file_name:
                raise CheckpointError(
                    f"{folder / INDEX_FILE} places {name!r} in {file_name}, which does not hold it",
                    "Download the index and its shards again, from one revision",
                )
        return cls(folder, files, owner)

    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self._owner)

    def __contains__(self, name: object) -> bool:
        return name in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name).entries[name].dtype

    def tensor_nbytes(self, name: str) -> int:
        return self._find(name).entries[name].nbytes

    def tensor(self, name: str) -> Tensor:
        """The tensor as a read-only view of the memory map; clone it to change it."""
        return self._find(name).tensor(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(entry.nbytes for file in self.files for entry in file.entries.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of the weight files on disk."""
        return sum(file.path.stat().st_size for file in self.files)

    def release(self) -> None:
        """Gives resident pages back to the system, so that streaming through a big model stays small. Tensors handed
        out before stay valid: their bytes are read again when used."""
        for file in self.files:
            file.release()

    def side_files(self) -> list[Path]:
        """Everything that is not a weight, an index of weights or hidden: config, tokenizer, templates, code, notes.
        Folders with weights of their own are other checkpoints, as one that was written here is, or is being written.
        """
        return sorted(_side_files(self.path))

    def _find(self, name: str) -> MappedFile:
        if name not in self._owner:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r} among its {len(self._owner)} tensors",
                "Check that config.json and the weights belong to the same model",
            )
        return self._owner[name]


def check_folder(path: str | Path) -> Path:
    """The folder at `path`. Raises CheckpointError when there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file, not a model folder", f"Name its folder, {folder.absolute().parent}")
    looks_like_hub_name = str(path).count("/") == 1 and not str(path).startswith((".", "/", "~"))
    download = (
        f", or fetch the model first: hf download {path} --local-dir {folder.name}" if looks_like_hub_name else ""
    )
    raise CheckpointError(f"model folder {folder} does not exist", f"Check the path{download}")


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """File names in order, and the index (empty for a single file). A single file wins, as in transformers."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE], {}
    if (folder / INDEX_FILE).is_file():
        index = _read_index(folder)
        return sorted(set(index.values())), index
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found, {}
    if found:
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files but no {INDEX_FILE}", "Download the index file too"
        )
    raise _no_weights(folder)


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        valid = all(isinstance(name, str) for name in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    if not pickles and any(folder.glob("*.gguf")):
        remedy = "GGUF files are not read: name a folder with the model's safetensors files"
        return CheckpointError(f"{folder} holds no safetensors weights", remedy)
    if not pickles:
        return CheckpointError(f"{folder} holds no safetensors weights", "Name a folder that holds model.safetensors")
    source, target = str(folder), f"{folder}-safetensors"
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained({source!r}, dtype='auto').save_pretrained({target!r}); "
        f"T.from_pretrained({source!r}).save_pretrained({target!r})"
    )
    return CheckpointError(
        f"{folder} holds only pickle weights ({pickles[0]}), which can run code when read",
        f"If you trust them, convert once: python -c {shlex.quote(code)} and use {target}",
    )


def _is_weight(file: Path) -> bool:
    name = file.name.lower()
    return Path(name).suffix in WEIGHT_SUFFIXES or name.endswith((".safetensors.index.json", ".bin.index.json"))


def _side_files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith(".") or _is_weight(entry):
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.is_symlink() and not _is_other_checkpoint(entry):
            yield from _side_files(entry)


def _is_other_checkpoint(folder: Path) -> bool:
    return folder.name.endswith(PARTIAL_SUFFIX) or any(folder.glob("*.safetensors"))

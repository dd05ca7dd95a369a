"""Copies of checkpoints with something changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def private_copy(source: Path, target: Path) -> Path:
    """A folder that a test may change."""
    return shutil.copytree(source, target)


def change_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """Edits the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    plain = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    """Sets fields of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return folder

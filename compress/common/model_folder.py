"""The folder that a path to a model means, and refusals of what is none, each with its remedy."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from compress.common.errors import CheckpointError
from compress.common.files import in_home, read_file

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model"
"""Beginning of the names of an adapter's weight files."""
PACKED = Path("packed")
"""Folder of results where none is named."""
GGUF_SUFFIX = ".gguf"
HUB_FOLDER = "models--"
"""Beginning of the names of the folders in the hub's cache."""


def find_folder(path: str | Path) -> Path:
    """Returns the folder of a model at `path`: of a folder in the hub's cache its snapshot, else the folder itself.
    Raises CheckpointError: the folder does not exist or is a file, the cache has no snapshot, or several without a
    revision `main`, or the folder holds only an adapter."""
    folder = in_home(path)
    if not folder.is_dir():
        raise _no_folder(folder)
    if folder.name.startswith(HUB_FOLDER) and (folder / "snapshots").is_dir():
        folder = _snapshot(folder)
    if (folder / ADAPTER_CONFIG).is_file() and not _has_model(folder):
        raise _only_adapter(folder)
    return folder


def no_file(path: Path, remedy: str) -> CheckpointError:
    """Builds the refusal of a model folder without the file `path`; a file of another case is named."""
    found = actual_case(path)
    return CheckpointError.missing("file", path, f"Rename {found.name} to {path.name}" if found else remedy)


def actual_case(path: Path) -> Path | None:
    """Returns the file or folder that `path` names in another case; None without one."""
    found = Path(path.absolute().anchor)
    for name in path.absolute().parts[1:]:
        if not (found / name).exists():
            try:
                alike = (each.name for each in found.iterdir() if each.name.casefold() == name.casefold())
                name = next(alike, "")
            except OSError:
                name = ""
            if not name:
                return None
        found /= name
    return found


def _no_folder(folder: Path) -> CheckpointError:
    if folder.exists():
        remedy = f"Name its folder, {folder.absolute().parent}"
        return CheckpointError(f"{folder} is a file, not a model folder", remedy)
    if found := actual_case(folder):
        remedy = f"Did you mean {found}?"
    elif folder == PACKED:
        remedy = "Create it with compress quantize, or name another folder"
    else:
        remedy = "Check the path"
    return CheckpointError.missing("model folder", folder, remedy)


def _snapshot(cached: Path) -> Path:
    """Returns the snapshot of the revision `main`, else the only one."""
    main = cached / "refs" / "main"
    if main.is_file() and (folder := cached / "snapshots" / main.read_text(encoding="utf-8").strip()).is_dir():
        return folder
    found = sorted(each for each in (cached / "snapshots").iterdir() if each.is_dir())
    if len(found) == 1:
        return found[0]
    name = cached.name.removeprefix(HUB_FOLDER).replace("--", "/")
    remedy = f"Name one: {', '.join(map(str, found))}" if found else f"Run hf download {name}"
    raise CheckpointError(f"{cached} has {len(found)} snapshots, and none is its revision main", remedy)


def _has_model(folder: Path) -> bool:
    kinds = ("*.safetensors", f"*{GGUF_SUFFIX}", "pytorch_model*.bin")
    return any(not file.name.startswith(ADAPTER_WEIGHTS) for kind in kinds for file in folder.glob(kind))


def _only_adapter(folder: Path) -> CheckpointError:
    try:
        base = str(json.loads(read_file(folder / ADAPTER_CONFIG))["base_model_name_or_path"])
    except (ValueError, LookupError, TypeError, RecursionError):
        base = "its base model"
    source, target = str(folder), f"{folder}-merged"
    code = (
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
        f"M.from_pretrained({source!r}, dtype='auto').merge_and_unload().save_pretrained({target!r}); "
        f"T.from_pretrained({base!r}).save_pretrained({target!r})"
    )
    return CheckpointError(
        f"{folder} is an adapter (LoRA) of {base}, not a model",
        f"Merge them once: python -c {shlex.quote(code)} and use {target}",
    )

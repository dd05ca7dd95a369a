"""Names of the files of a model, and which of them are read. Does not import torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path, PurePath

from compress.common.errors import CheckpointError
from compress.common.model_folder import GGUF_SUFFIX

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SAFETENSORS_SUFFIX = ".safetensors"
WITHOUT_VALUES = "without values"
"""Key in the metadata of a safetensors file that has only a header, and no bytes of tensors."""
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
WEIGHT_SUFFIXES = PICKLE_SUFFIXES | {
    SAFETENSORS_SUFFIX,
    GGUF_SUFFIX,
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".npy",
    ".ot",
    ".tflite",
}
_TEXT_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"})
"""Suffixes of configs, tokenizers, chat templates and cards."""
_TERMS = ("LICENSE", "LICENCE", "NOTICE")
_CODE_SUFFIX = ".py"
_TEMPLATES = "additional_chat_templates"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def is_weight(name: str) -> bool:
    """Whether a file holds weights, or the index of such files."""
    lower = name.lower()
    return PurePath(lower).suffix in WEIGHT_SUFFIXES or lower.endswith((".safetensors.index.json", ".bin.index.json"))


def side_names(names: Iterable[str], code: bool) -> list[str]:
    """Returns the files other than weights that are read or copied: config, tokenizer, templates, card and licence.

    Args:
        names: paths in the folder of a model.
        code: whether Python files are read as well.
    """
    suffixes = _TEXT_SUFFIXES | ({_CODE_SUFFIX} if code else set())
    return [
        name
        for name in names
        if PurePath(name).parent.name in ("", _TEMPLATES)
        and not is_weight(name)
        and (PurePath(name).suffix.lower() in suffixes or name.upper().startswith(_TERMS))
    ]


def weight_names(names: Iterable[str], index: str) -> list[str]:
    """Returns the safetensors files that are read: the single one, or those that the index names.

    Args:
        index: text of the index of shards; empty without one.
    """
    found = [name for name in names if "/" not in name and name.endswith(SAFETENSORS_SUFFIX)]
    if SINGLE_FILE in found:
        return [SINGLE_FILE]
    return [INDEX_FILE, *(name for name in found if f'"{name}"' in index)] if index else found


def part_names(name: str) -> list[str] | None:
    """Returns the names of all parts of a split GGUF file, by that of one of them; None for a file of its own."""
    found = _PART.fullmatch(name)
    if found is None or int(found[3]) < 2:
        return None
    return [f"{found[1]}-{part:05}-of-{found[3]}{found[4]}" for part in range(1, int(found[3]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """Returns the parts of a model, by the names that the first one implies; only the file itself if it is not a part.

    Raises:
        CheckpointError: another part than the first, or parts that are missing.
    """
    names = part_names(path.name)
    if names is None:
        return [path]
    paths = [path.with_name(name) for name in names]
    if path != paths[0]:
        raise CheckpointError(f"{path} is not the first of {len(paths)} parts", f"Name the first one, {paths[0]}")
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{path.parent} has no {missing[0]}{more}", "Download all parts into one folder")
    return paths


def only_pickles(source: str, name: str, target: str) -> CheckpointError:
    """Returns the refusal of a model without other weights than pickle files, with the command that converts it.

    Args:
        source: folder of the model, or its name on the hub.
        name: one of the files.
        target: folder that the command writes.
    """
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained({source!r}, dtype='auto').save_pretrained({target!r}); "
        f"T.from_pretrained({source!r}).save_pretrained({target!r})"
    )
    return CheckpointError(
        f"{source} holds only pickle weights ({name}), which can run code when read",
        f"If you trust them, convert once: python -c {shlex.quote(code)} and use {target}",
    )

"""Receipts: what a packed checkpoint was made from, by hashes, so that another machine can repeat the run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.config import CONFIG_FILE
from compress.checkpoint.safetensors import TensorFiles
from compress.common.cli import DISTRIBUTION, tool_version
from compress.common.errors import CheckpointError
from compress.common.files import RECEIPT_FILE, atomic_file, read_json
from compress.common.work_folder import changes
from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set
from compress.pipeline.finish import environment
from compress.pipeline.prepare import RunContext, describe_calibration

FORMAT_VERSION = 1
INPUTS = ("tool", "source", "calibration", "recipe", "options", "environment")
"""Entries of a receipt that the bytes of the outputs follow from."""
ORDER_OF_SUMS = ("device", "threads", "instruction_set", "torch_instruction_set", "torch")
"""Entries of `environment` that decide the order in which calibrated statistics are summed up, and so the last bits.
Rounding without calibration gives the same bytes with every instruction set and number of threads."""
LIBRARIES = ("transformers", "tokenizers", "safetensors", "numpy")


def write_receipt(context: RunContext, folder: Path) -> None:
    """Writes the receipt of the finished checkpoint in `folder`. Equal runs write equal receipts."""
    receipt = {
        "format_version": FORMAT_VERSION,
        "command": shlex.split(context.request.command),
        **inputs(context),
        "bits_depend_on": [] if context.sequences is None else list(ORDER_OF_SUMS),
        "outputs": output_hashes(folder),
    }
    with atomic_file(folder / RECEIPT_FILE) as stream:
        stream.write((json.dumps(receipt, indent=2) + "\n").encode())


def inputs(context: RunContext) -> dict[str, Any]:
    """Returns the entries `INPUTS` of the receipt of a run."""
    recipe, sequences = context.request.recipe, context.sequences
    files = [file.path for file in context.files.files]
    config = context.request.model / CONFIG_FILE
    return {
        "tool": f"{DISTRIBUTION} {tool_version()}",
        "source": {"name": context.request.source, "files": hashes([*files, *([config] if config.is_file() else ())])},
        "calibration": None
        if sequences is None
        else {
            **(describe_calibration(recipe, sequences) or {}),
            "token_sha256": sequences.token_sha256,
        },
        "recipe": recipe.to_dict(),
        "options": {
            "dtype": str(context.dtype).removeprefix("torch."),
            "micro_batch": context.micro_batch,
            "workers": len(context.workers.all),
            "tokens_per_channel": context.request.tokens_per_channel,
        },
        "environment": {
            **environment(context),
            **{name: importlib.metadata.version(name) for name in LIBRARIES},
            "device_type": context.device.type,
            "processor": platform.machine(),
            "instruction_set": INSTRUCTION_SETS[best_instruction_set()] if best_instruction_set() >= 0 else "none",
            "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        },
    }


def hashes(files: Iterable[Path]) -> dict[str, str]:
    """Returns the SHA-256 of files by their name, in order of the name."""
    found = {}
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as stream:
            found[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def output_hashes(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of the weight files of a checkpoint, and of their index where there is one."""
    return hashes([*(file.path for file in TensorFiles.open(folder).files), *folder.glob("*.safetensors.index.json")])


def read_receipt(folder: Path) -> dict[str, Any]:
    """Reads the receipt in a folder. Raises CheckpointError: there is none, or another version wrote it."""
    path = folder / RECEIPT_FILE
    if not path.is_file():
        raise CheckpointError.missing("file", path, "Name a folder that `compress quantize`, `run` or `search` wrote")
    receipt = read_json(path)
    if not isinstance(receipt, dict) or receipt.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path} is not a receipt of this version", "Use the release that wrote it")
    if lacking := [name for name in (*INPUTS, "command", "outputs") if name not in receipt]:
        raise CheckpointError(f"{path} has no entry {lacking[0]}", "Copy this file again, or repeat the run")
    return receipt


def changed_files(recorded: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yields a line for each recorded file that a folder lacks or holds with other bytes."""
    for name, expected in recorded.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is not in {folder}"
        elif hashes([path])[name] != expected:
            yield f"{name} in {folder} has other bytes than the receipt says"


def changed_inputs(recorded: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """Returns what differs between the inputs of two receipts, a line each."""
    return changes({name: recorded[name] for name in INPUTS}, {name: again[name] for name in INPUTS})

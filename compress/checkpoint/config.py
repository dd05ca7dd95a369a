"""Reading and writing of config.json, including the entries of packed checkpoints. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.common.errors import CheckpointError
from compress.common.files import read_json
from compress.common.model_folder import no_file
from compress.models.config import block
from compress.models.wrappers import text_part, whole_config

CONFIG_FILE = "config.json"
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quanto_qmap.json": "quanto",
    "hf_quant_config.json": "modelopt",
}
"""Files of older checkpoints and of optimum-quanto, and the formats that they describe."""
QUANTIZATION_KEY = "quantization_config"
COMPRESSION_KEY = "compression_config"
FORMAT_VERSION = 1
HEAD = "lm_head"

ModelConfig = dict[str, Any]
"""The object in config.json, keys unchanged, or its part for the text model of a multimodal one."""


def read_config(path: str | Path) -> ModelConfig:
    """Reads config.json of a model folder, or its text model's part, and merges the quantization file of older GPTQ and
    AWQ checkpoints, and of optimum-quanto's.

    Raises:
        CheckpointError: missing, not JSON, or of a newer `compression_config.format_version` than this code knows.
    """
    folder = Path(path)
    config = _read_json(folder / CONFIG_FILE)
    for name, method in QUANTIZATION_FILES.items():
        if QUANTIZATION_KEY not in config and (folder / name).is_file():
            config[QUANTIZATION_KEY] = {"quant_method": method, **_read_json(folder / name)}
    version = compression_block(config).get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has {COMPRESSION_KEY}.format_version {version!r}; this version reads 1 to {FORMAT_VERSION}",
            "Install a newer release of this toolkit",
        )
    return text_part(config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes config.json with indentation, in the given key order; a text model's config as part of the whole
    config."""
    (folder / CONFIG_FILE).write_text(
        json.dumps(whole_config(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def packed_config(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
    modules: Iterable[str],
    provenance: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Returns the config of a packed checkpoint: the source's config plus two entries.

    Args:
        config: the source's config.json.
        quantization: `quantization_config(...)` of the chosen format; empty for a dense checkpoint.
        modules: quantized modules; a quantized `lm_head` unties the embeddings explicitly.
        provenance: fields of `compression_config` besides `format_version`: source, recipe, seed, tool version ...
    """
    packed = dense_config(config)
    if HEAD in set(modules):
        packed["tie_word_embeddings"] = False
    if quantization:
        packed[QUANTIZATION_KEY] = dict(quantization)
    if provenance is not None:
        packed[COMPRESSION_KEY] = {**provenance, "format_version": FORMAT_VERSION}
    return packed


def dense_config(config: Mapping[str, Any]) -> ModelConfig:
    """Returns a config without the entries of packed checkpoints."""
    return {key: value for key, value in config.items() if key not in (QUANTIZATION_KEY, COMPRESSION_KEY)}


def quantization_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `quantization_config`, empty for a dense model. Raises CheckpointError if it is not an object."""
    return block(config, QUANTIZATION_KEY)


def format_name(block: Mapping[str, Any]) -> str:
    """Returns the format of a `quantization_config`: its `quant_method`, or `format` of our own, which has none."""
    return str(block.get("quant_method") or block.get("format") or "?")


def compression_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `compression_config`, empty for checkpoints of other tools. Raises CheckpointError if it is not an
    object."""
    return block(config, COMPRESSION_KEY)


def is_tied(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Returns whether the output head is tied to the embedding. Without the key, a stored `lm_head` means that it is
    not."""
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    return not any(name.startswith(f"{HEAD}.") for name in names)


def is_embedding(module: str) -> bool:
    """Returns whether a matrix of this name is an embedding, which is looked up by row."""
    leaf = module.rpartition(".")[2]
    return leaf != "embed_out" and any(part in leaf for part in ("embed", "wte", "wpe"))


def dtype_name(config: Mapping[str, Any]) -> str:
    """Returns the name of the model's dtype in its config: `bfloat16`, `float16` or `float32` (also the fallback)."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in ("bfloat16", "float16", "float64") else "float32"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except FileNotFoundError as error:
        raise no_file(path, "Name a Hugging Face model folder with a config.json") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object", "Download this file again")
    return config

"""Dense view of a quantized checkpoint: weights are dequantized on each read, without caching."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from compress.checkpoint.config import ModelConfig, dense_config, quantization_block
from compress.checkpoint.expert_files import split_experts
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.formats.gguf import GGUF
from compress.checkpoint.reader import PackedCheckpoint, open_stored
from compress.checkpoint.safetensors import LazyTensor, TensorFiles
from compress.checkpoint.weights import Scheme

UNUSED_SCALES = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)
"""Suffixes of measured scales of inputs, keys and values; here they are found as tokens come."""


def value_dtype(packed: PackedCheckpoint) -> torch.dtype:
    """Returns the model's dtype, that of the largest dense tensor where config.json names none."""
    if packed.config.get("dtype") or packed.config.get("torch_dtype"):
        return packed.dtype
    names = (name for name in packed.dense_names() if not name.endswith(UNUSED_SCALES))
    return packed.files.dtype(max(names, key=lambda name: math.prod(packed.files.shape(name))))


def describe_source(packed: PackedCheckpoint) -> str:
    """Describes the stored form of a source and its conversion, in one line."""
    stored = ", ".join(sorted({str(scheme) for scheme in packed.schemes.values()}))
    dtype = str(value_dtype(packed)).removeprefix("torch.")
    return f"{stored} ({packed.format}), dequantized to {dtype} block by block"


def working_bytes(packed: PackedCheckpoint) -> int:
    """Returns the memory of codes and values of the largest weight, while it is dequantized."""
    largest = max((math.prod(packed.shape(module)) for module in packed.modules), default=0)
    return largest * (1 + value_dtype(packed).itemsize)


def dequantized_files(packed: PackedCheckpoint) -> TensorFiles:
    """Returns the tensors of a quantized checkpoint by the names of a dense one. Measured scales are left out."""
    files, dtype = packed.files, value_dtype(packed)
    names = packed.dense_names()
    unused = [name for name in names if name.endswith(UNUSED_SCALES)]
    dense = {name: files[name] for name in names if not name.endswith(UNUSED_SCALES)}
    values = {f"{module}.weight": _dequantized(packed, module, dtype) for module in packed.modules}
    notes = [f"source: {describe_source(packed)}", *files.notes]
    if inputs := packed.describe_inputs():
        notes.append(f"inputs that the source rounds keep 16 bits: {inputs}")
    if unused:
        notes.append(
            f"{len(unused)} measured scales of inputs, keys or values are left out, e.g. {unused[0]}: they are found "
            "as tokens come"
        )
    return replace(files, tensors={**dense, **values}, notes=tuple(notes), packed=packed)


def _dequantized(packed: PackedCheckpoint, module: str, dtype: torch.dtype) -> LazyTensor:
    """Returns a weight that is dequantized on each read, rounded once to `dtype`. A form that only this runtime loads
    from a folder is not kept from a GGUF file."""
    scheme, read = packed.schemes[module], partial(packed.values, module, dtype)
    kept = None if scheme.structure and packed.codec is GGUF else scheme
    return LazyTensor(dtype, packed.shape(module), packed.weight_bytes(module), read, scheme=kept)


def dequantized(packed: PackedCheckpoint) -> PackedCheckpoint:
    """Returns the dense view of a quantized checkpoint, with a config without quantization."""
    files = dequantized_files(packed) if packed.schemes else packed.files
    return replace(packed, config=dense_config(packed.config), files=files, schemes={}, inputs={}, codec=DENSE)


def open_source(path: str | Path) -> tuple[TensorFiles, ModelConfig]:
    """Opens the tensors and the config of a model, dense or quantized, as those of a dense one; reads headers only.

    Raises:
        CheckpointError: see `PackedCheckpoint.open`.
    """
    files, config = open_stored(path)
    if not quantization_block(config):
        return split_experts(files, config), config
    source = dequantized(PackedCheckpoint.open(path))
    return source.files, source.config


def stored_scheme(files: TensorFiles, name: str) -> Scheme | None:
    """Returns the scheme in which a source stores a tensor; None where it is dense, changed on reading, or has a column
    order that is not preserved."""
    scheme = files[name].scheme if name in files else None
    if scheme is None or files.packed is None or files.packed.column_order(name.removesuffix(".weight")) is not None:
        return None
    return scheme

"""Dense view of a quantized checkpoint: weights are dequantized on each read, without caching."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.config import (
    COMPRESSION_KEY,
    QUANTIZATION_KEY,
    ModelConfig,
    dtype_name,
    quantization_block,
)
from compress.checkpoint.expert_files import split_experts
from compress.checkpoint.formats import TRANSLATIONS, dense, gguf
from compress.checkpoint.reader import PackedCheckpoint, open_stored
from compress.checkpoint.safetensors import TensorFiles
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


@dataclass
class DequantizedFiles(TensorFiles):
    """The tensors of a quantized checkpoint by the names of a dense one.

    Attributes:
        packed: the checkpoint as stored.
    """

    packed: PackedCheckpoint

    @classmethod
    def over(cls, packed: PackedCheckpoint) -> DequantizedFiles:
        files = packed.files
        return cls(files.path, files.files, files._owner, packed, text_names=files.text_names)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of quantized weights by name."""
        return {f"{module}.weight": self.packed.shape(module) for module in self.packed.modules}

    @cached_property
    def _dense(self) -> frozenset[str]:
        """Names of all other tensors."""
        return frozenset(self.packed.dense_names()) - set(self.unused_scales)

    @cached_property
    def unused_scales(self) -> tuple[str, ...]:
        """Names of measured scales, which a dense checkpoint does not have."""
        return tuple(name for name in self.packed.dense_names() if name.endswith(UNUSED_SCALES))

    @cached_property
    def _value_dtype(self) -> torch.dtype:
        """The model's dtype, that of the largest dense tensor where config.json names none."""
        if self.packed.config.get("dtype") or self.packed.config.get("torch_dtype"):
            return getattr(torch, dtype_name(self.packed.config))
        files = self.packed.files
        return files.dtype(max(self._dense, key=lambda name: math.prod(files.shape(name))))

    def notes(self) -> list[str]:
        """Returns lines on the source for a plan."""
        lines = [f"source: {self.description}", *super().notes()]
        if inputs := self.packed.describe_inputs():
            lines.append(f"inputs that the source rounds keep 16 bits: {inputs}")
        if self.unused_scales:
            lines.append(
                f"{len(self.unused_scales)} measured scales of inputs, keys or values are left out, e.g. "
                f"{self.unused_scales[0]}: they are found as tokens come"
            )
        return lines

    def scheme(self, name: str) -> Scheme | None:
        """Returns the stored scheme of a tensor; None if it is dense, has a column order that is not preserved, or
        comes from a GGUF file in a form that only this runtime loads from a folder."""
        module = name.removesuffix(".weight")
        is_kept = name in self._shapes and self.packed.column_order(module) is None
        scheme = self.packed.scheme(module) if is_kept else None
        return None if scheme is not None and scheme.structure and self.packed.format == gguf.NAME else scheme

    def names(self) -> list[str]:
        return sorted([*self._shapes, *self._dense])

    def __contains__(self, name: object) -> bool:
        return name in self._shapes or name in self._dense

    def __len__(self) -> int:
        return len(self._shapes) + len(self._dense)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self.packed.files.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._value_dtype if name in self._shapes else self.packed.files.dtype(name)

    def tensor_nbytes(self, name: str) -> int:
        """Returns the stored bytes; those of codes and scales for a quantized weight."""
        if name in self._shapes:
            return self.packed.weight_bytes(name.removesuffix(".weight"))
        return self.packed.files.tensor_nbytes(name)

    def place(self, name: str) -> None:
        """Returns None: no tensor is looked for in a file."""

    def tensor(self, name: str) -> Tensor:
        """Returns the dequantized weight, rounded once to the model's dtype, or the stored tensor."""
        if name not in self._shapes:
            return self.packed.files.tensor(name)
        return self.packed.values(name.removesuffix(".weight"), self._value_dtype)

    @property
    def working_bytes(self) -> int:
        """Memory of codes and values of the largest weight, while it is dequantized."""
        largest = max(map(math.prod, self._shapes.values()), default=0)
        return largest * (1 + self._value_dtype.itemsize)

    @property
    def description(self) -> str:
        """Description of the stored form and its conversion, in one line."""
        stored = ", ".join(sorted({str(scheme) for scheme in self.packed.schemes.values()}))
        dtype = str(self._value_dtype).removeprefix("torch.")
        return f"{stored} ({self.packed.format}), dequantized to {dtype} block by block"


def dequantized(packed: PackedCheckpoint) -> PackedCheckpoint:
    """Returns the dense view of a quantized checkpoint, with a config without quantization."""
    config = {key: value for key, value in packed.config.items() if key not in (QUANTIZATION_KEY, COMPRESSION_KEY)}
    files = DequantizedFiles.over(packed) if packed.schemes else packed.files
    translation = TRANSLATIONS[dense.NAME]
    return replace(packed, config=config, files=files, schemes={}, inputs={}, codec=dense, translation=translation)


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
    """Returns the scheme in which a source stores a tensor; None where it is dense, or changed on reading."""
    return files.scheme(name) if isinstance(files, DequantizedFiles) else None

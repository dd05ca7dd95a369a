"""What only the checkpoint itself says: stored bits of every packed layer, and what a token's keys and values take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.checkpoint.config import dtype_name, read_config
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import ToolkitError
from compress.reporting.report_data import RunReport
from compress.targets import without_indices

# Some configs say "no limit" by a number past every real size.
_UNLIMITED = 2**31
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
# Biases, and the shapes that are written beside packed weights for loaders.
_NO_WEIGHT = ("bias", "weight_shape")


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Keys and values of one token in all layers, in the model's dtype.

    Attributes:
        token_bytes: `2 * layers * kv_heads * head_dim * item size`.
        max_tokens: longest sequence the model was made for; 2,048 where the config names none.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    max_tokens: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Headers:
    """Facts from config.json and the weight files' headers.

    Attributes:
        key_values: None when the config does not say enough.
        layer_bits: stored bits per weight by module; empty when the weight files are not there.
        missing: why something could not be read; empty when all was.
    """

    key_values: KeyValues | None
    layer_bits: dict[str, float]
    missing: tuple[str, ...]


def read_headers(report: RunReport) -> Headers:
    """Reads what is there; a report without its checkpoint is still worth a page."""
    missing: list[str] = []
    key_values, bits = None, dict[str, float]()
    try:
        key_values = _key_values(read_config(report.folder))
    except ToolkitError as error:
        missing.append(f"memory per token is not known: {error}")
    else:
        if key_values is None:
            missing.append("memory per token is not known: config.json lacks layers, heads or sizes")
    try:
        bits = _layer_bits(report)
    except ToolkitError as error:
        missing.append(f"bits of each layer are not known: {error}")
    return Headers(key_values, bits, tuple(missing))


def _key_values(config: Mapping[str, Any]) -> KeyValues | None:
    layers, heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    if not (layers and heads and hidden):
        return None
    return KeyValues(
        layers=layers,
        kv_heads=_size(config, "num_key_value_heads") or heads,
        head_dim=_size(config, "head_dim") or hidden // heads,
        dtype=dtype_name(config),
        max_tokens=_size(config, "max_position_embeddings") or 2048,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number of the config; 0 when it is missing or something else."""
    value = config.get(key)
    return value if type(value) is int and 0 < value < _UNLIMITED else 0


def _layer_bits(report: RunReport) -> dict[str, float]:
    files = TensorFiles.open(report.folder)
    stored: dict[str, int] = {}
    for name in files.names():
        module, _, part = name.rpartition(".")
        if part not in _NO_WEIGHT:
            stored[module] = stored.get(module, 0) + files.tensor_nbytes(name)
    weights = {kind.tensor: math.prod(kind.shape) for kind in report.kinds if len(kind.shape) > 1}
    found = {}
    for linear in report.linears:
        parameters = weights.get(without_indices(linear.module), 0)
        if parameters and linear.module in stored:
            found[linear.module] = 8 * stored[linear.module] / parameters
    return found

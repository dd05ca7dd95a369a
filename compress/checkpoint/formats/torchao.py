"""torchao's safetensors (`quant_method: torchao`), read only: 8-bit integers and floats, with a scale per row or group.

Tensors of a weight are named `_weight_qdata`, `_weight_scale` and `_weight_zero_point`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from compress.checkpoint.formats.base import CONTAINERS, ReadOnly
from compress.checkpoint.weights import Activations, Fp8, Int, Scheme
from compress.checkpoint.weights.base import Get, StoredTensors, row_scales
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.layouts import check_float_codes
from compress.common.errors import CheckpointError

CODES, SCALES, ZERO_POINTS = "._weight_qdata", "._weight_scale", "._weight_zero_point"
FORMS: Mapping[str, tuple[Scheme, Activations | None]] = {
    "Int8WeightOnlyConfig": (Int(8, None, symmetric=False), None),
    "Int8DynamicActivationInt8WeightConfig": (Int(8, None, symmetric=False), Activations.INT8),
    "Float8WeightOnlyConfig": (Fp8(), None),
}
"""Forms of weights and rounding of their inputs by configurations of torchao."""


def _form(config: Mapping[str, Any]) -> tuple[Scheme, Activations | None]:
    given = (config.get("quant_type") or {}).get("default") or {}
    name, fields = str(given.get("_type")), given.get("_data") or {}
    usual = {"granularity": ("_type", "PerRow"), "act_mapping_type": ("_data", "SYMMETRIC")}
    is_usual = all((fields.get(key) or {}).get(part, value) == value for key, (part, value) in usual.items())
    if name not in FORMS or not is_usual or fields.get("group_size"):
        raise CheckpointError(
            f"weights of torchao's {name} are not read as they are configured",
            f"It reads {', '.join(FORMS)}, symmetric with scales of rows",
        )
    return FORMS[name]


class Torchao(ReadOnly):
    """torchao."""

    name = "torchao"
    keys = "include_input_output_embeddings quant_type untie_embedding_weights"
    stored = CODES, SCALES, ZERO_POINTS
    mark = CODES

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module: the same for all. Raises CheckpointError for a configuration that is not read."""
        return dict.fromkeys(modules, _form(config)[0])

    def inputs(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
        kind = _form(config)[1]
        return {} if kind is None else dict.fromkeys(self.modules(names), kind)

    def decode(self, module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> CodedWeight:
        stored = StoredTensors(module, get)
        codes, scales = stored[CODES], stored[SCALES].float()
        scales = row_scales(scales, len(codes), 1)
        if isinstance(scheme, Fp8):
            check_float_codes(module, codes)
            return CodedWeight(codes, scales, scheme)
        integers = cast(Int, scheme)
        zeros = torch.full(scales.shape, integers.zero, dtype=torch.uint8)
        if stored.optional(ZERO_POINTS) is not None:
            zeros = integers.unsigned(stored, ZERO_POINTS).reshape(scales.shape)
        return integers.weight(integers.unsigned(stored, CODES), scales, zeros)

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        rows, columns = get(module + CODES).shape
        return rows, columns


TORCHAO = CONTAINERS.register(order=10)(Torchao())

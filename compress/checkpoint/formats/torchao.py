"""torchao's safetensors (`quant_method: torchao`), read only: 8-bit integers and floats, with a scale per row or group.

Tensors of a weight are named `_weight_qdata`, `_weight_scale` and `_weight_zero_point`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from compress.checkpoint.formats.read_only import check as check
from compress.checkpoint.formats.read_only import encode as encode
from compress.checkpoint.formats.read_only import quantization_config as quantization_config
from compress.checkpoint.weights import Activations, Fp8, Int, Scheme
from compress.checkpoint.weights.base import Get, StoredTensors, owners, row_scales
from compress.checkpoint.weights.fp8 import Fp8Weight, check_codes
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import CheckpointError, SchemeError

NAME = "torchao"
CODES, SCALES, ZERO_POINTS = "._weight_qdata", "._weight_scale", "._weight_zero_point"
FORMS: Mapping[str, tuple[Scheme, Activations | None]] = {
    "Int8WeightOnlyConfig": (Int(8, None, symmetric=False), None),
    "Int8DynamicActivationInt8WeightConfig": (Int(8, None, symmetric=False), Activations.INT8),
    "Float8WeightOnlyConfig": (Fp8(), None),
}
"""Forms of weights and rounding of their inputs by configurations of torchao."""


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffixes of a module's stored tensors."""
    return CODES, SCALES, ZERO_POINTS


def modules(names: Iterable[str]) -> list[str]:
    """Quantized modules among tensor names."""
    return owners(names, CODES)


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module: the same for all. Raises CheckpointError for a configuration that is not read."""
    return dict.fromkeys(modules, _form(config)[0])


def inputs(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
    """Rounding of the inputs of every module among tensor names."""
    kind = _form(config)[1]
    return {} if kind is None else dict.fromkeys(modules(names), kind)


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


def decode(module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> IntegerWeight | Fp8Weight:
    """The weight of one stored layer. Raises CheckpointError or SchemeError for tensors of another form."""
    stored = StoredTensors(module, get)
    codes, scales = stored[CODES], stored[SCALES].float()
    scales = row_scales(scales, len(codes), 1)
    if isinstance(scheme, Fp8):
        check_codes(module, codes)
        return Fp8Weight(codes, scales, scheme)
    if not isinstance(scheme, Int) or codes.dtype != torch.int8:
        raise SchemeError(f"{module} should hold int8 codes, not {codes.dtype}")
    zero = stored.optional(ZERO_POINTS)
    zero = torch.zeros(scales.shape, dtype=torch.int8) if zero is None else zero.reshape(scales.shape)
    codes, zero = ((part.to(torch.int16) + scheme.midpoint).to(torch.uint8) for part in (codes, zero))
    return IntegerWeight(codes, scales, zero, scheme)


def shape(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of a stored layer, without decoding it."""
    rows, columns = get(module + CODES).shape
    return rows, columns

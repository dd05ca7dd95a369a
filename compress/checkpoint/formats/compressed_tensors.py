"""compressed-tensors, the default: `pack-quantized` (2 to 8 bits, 16-bit activations), `int-quantized` (W8A8) and 8-bit
floats (`float_quantized`).

Loaded unchanged by vLLM, SGLang and transformers with the compressed-tensors package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.tensors import (
    Get,
    cast_exactly,
    optional,
    owners,
    refuse_activation_order,
    refuse_structure,
)
from compress.checkpoint.packing import num_words, pack_bits, unpack_bits
from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import CodedWeight
from compress.checkpoint.weights.fp8 import FP8, Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import CheckpointError, SchemeError

FLOAT, NAIVE = "float-quantized", "naive-quantized"


def layout(scheme: Scheme) -> str:
    """The name compressed-tensors has for it: with 8-bit activations, or of weights alone."""
    return FLOAT if scheme.activation_bits else NAIVE


def encode_float(module: str, weight: Fp8Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of one linear layer, by full name. `dtype` is the model's, in which scales are stored."""
    return {f"{module}.weight": weight.codes, f"{module}.weight_scale": cast_exactly(module, weight.scale, dtype)}


def decode_float(module: str, get: Get, scheme: Scheme) -> Fp8Weight:
    """The weight, also of a file with one scale for the whole matrix.

    Raises:
        CheckpointError: codes of another dtype, or some that are no numbers.
    """
    codes, scale = get(f"{module}.weight"), get(f"{module}.weight_scale")
    if codes.dtype != FP8:
        raise CheckpointError(f"{module}.weight should hold 8-bit floats (e4m3), but is {codes.dtype}")
    if bad := int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum()):
        raise CheckpointError(f"{module}.weight holds {bad} codes that are no numbers (NaN)", "Quantize it again")
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(codes.shape[0], 1)
    return Fp8Weight(codes, scale.reshape(codes.shape[0], 1).contiguous(), scheme)


NAME = "compressed-tensors"
PACKED, INTEGER = "pack-quantized", "int-quantized"
SUFFIXES: tuple[str, ...] = (
    ".weight_packed",
    ".weight_scale",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight",
)
WRITER_VERSION = "0.17.0"
"""Layout generation named in the config: since then every width is packed as one dense bit stream."""


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when this format cannot hold a weight `[O, I]` of this scheme."""
    refuse_structure(NAME, scheme)
    scheme.num_groups(shape[1])
    if scheme.activation_bits and (scheme.bits, scheme.group_size, scheme.symmetric) != (8, None, True):
        raise SchemeError(
            f"{scheme} cannot be stored: 8-bit activations need symmetric 8-bit weights per channel",
            "Use --bits 8 --group-size -1 --symmetric, or 16-bit activations",
        )


def encode(module: str, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of one linear layer, by full name. `dtype` is the model's, in which scales are stored."""
    check(weight.scheme, weight.shape)
    if isinstance(weight, Fp8Weight):
        return encode_float(module, weight, dtype)
    bits = weight.scheme.bits
    scale = cast_exactly(module, weight.scale, dtype)
    if weight.scheme.activation_bits:
        return {f"{module}.weight": (weight.codes ^ 0x80).view(torch.int8), f"{module}.weight_scale": scale}
    tensors = {
        f"{module}.weight_packed": pack_bits(weight.codes, bits, 1),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not weight.scheme.symmetric:
        tensors[f"{module}.weight_zero_point"] = pack_bits(weight.zero, bits, 0)
    return tensors


def decode(module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> CodedWeight:
    """The codes of one stored layer. Raises CheckpointError when tensors contradict each other."""
    return decode_float(module, get, scheme) if scheme.fp8 else decode_integers(module, get, scheme)


def decode_integers(module: str, get: Get, scheme: Scheme) -> IntegerWeight:
    """The integer form of one stored layer. Raises CheckpointError when tensors contradict each other."""
    packed = optional(get, f"{module}.weight_packed")
    scale = get(f"{module}.weight_scale")
    if packed is None:
        signed = get(f"{module}.weight")
        if signed.dtype != torch.int8:
            raise CheckpointError(f"{module}.weight should hold int8 codes, but is {signed.dtype}")
        codes = (signed.to(torch.int16) + scheme.midpoint).to(torch.uint8)
    else:
        rows, columns = get(f"{module}.weight_shape").tolist()
        if packed.shape != (rows, num_words(columns, scheme.bits)):
            raise CheckpointError(
                f"{module}.weight_packed is {list(packed.shape)}, but {rows} x {columns} codes of {scheme.bits} bits "
                f"pack to {[rows, num_words(columns, scheme.bits)]}",
                "Write it again with compressed-tensors 0.16 or newer: before, 3, 5, 6 and 7 bits had another layout",
            )
        codes = unpack_bits(packed, scheme.bits, columns, 1)
    groups = scheme.num_groups(codes.shape[1])
    refuse_activation_order(module, optional(get, f"{module}.weight_g_idx"), codes.shape[1], scheme.group_size)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(codes.shape[0], 1)
    scale = scale.reshape(codes.shape[0], groups).contiguous()
    return IntegerWeight(codes, scale, read_zero(module, get, scheme, codes.shape[0], groups), scheme)


def read_zero(module: str, get: Get, scheme: Scheme, rows: int, groups: int) -> Tensor:
    """Zero points `[O, G]` of a stored layer; the midpoint everywhere when it is symmetric."""
    stored = None if scheme.symmetric else optional(get, f"{module}.weight_zero_point")
    if stored is None:
        return torch.full((rows, groups), scheme.midpoint, dtype=torch.uint8)
    if stored.dtype == torch.int32:
        return unpack_bits(stored, scheme.bits, rows, 0)
    return (stored.to(torch.int16) + scheme.midpoint).to(torch.uint8).reshape(rows, groups)


def shape(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of a stored layer, without decoding it."""
    unpacked = optional(get, f"{module}.weight")
    rows, columns = get(f"{module}.weight_shape").tolist() if unpacked is None else unpacked.shape
    return rows, columns


def modules(names: Iterable[str]) -> list[str]:
    """Quantized modules among tensor names."""
    return owners(names, ".weight_scale")


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json, with the keys that every reader accepts and no others.

    Args:
        schemes: scheme of every quantized module. One scheme targets the class `Linear`; several name their modules.
        ignored: every linear module that stays dense, by full name.
    """
    grouped: dict[Scheme, list[str]] = {}
    for module in sorted(schemes):
        grouped.setdefault(schemes[module], []).append(module)
    groups = {
        f"group_{number}": _config_group(scheme, ["Linear"] if len(grouped) == 1 else members)
        for number, (scheme, members) in enumerate(grouped.items())
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": NAME,
        "version": WRITER_VERSION,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": groups,
    }


def _config_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    kind = "float" if scheme.fp8 else "int"
    weights = {
        "num_bits": scheme.bits,
        "type": kind,
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    activations = {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
    }
    return {
        "targets": targets,
        "format": _layout(scheme),
        "weights": weights,
        "input_activations": activations if scheme.activation_bits else None,
        "output_activations": None,
    }


def _layout(scheme: Scheme) -> str:
    if scheme.fp8:
        return layout(scheme)
    return INTEGER if scheme.activation_bits else PACKED


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module, from a `quantization_config` that any tool wrote.

    Raises:
        CheckpointError: a module that no group targets, or a scheme outside of integers and 8-bit floats with 16-bit or
            dynamic 8-bit activations of the same kind.
    """
    groups = list((config.get("config_groups") or {}).values())
    return {module: _parse_group(module, _find_group(module, groups)) for module in modules}


def _find_group(module: str, groups: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The group of a module: its own name wins over a pattern, a pattern over the class."""
    matches = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
        lambda target: target in ("Linear", "Embedding"),
    )
    for match in matches:
        for group in groups:
            if any(match(target) for target in group.get("targets", ())):
                return group
    raise CheckpointError(f"no config group of quantization_config targets {module}, which is stored quantized")


def _parse_group(module: str, group: Mapping[str, Any]) -> Scheme:
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    kind, bits = weights.get("type", "int"), int(weights["num_bits"])
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    readable = ("channel", "tensor") if kind == "float" else ("group", "channel", "tensor")
    if kind not in ("int", "float") or (kind == "float" and bits != 8) or strategy not in readable:
        raise CheckpointError(
            f"{module} is quantized as {bits}-bit {kind} by {strategy}, which this toolkit does not read",
            "It reads integer weights by group, channel or tensor, and 8-bit floats by channel or tensor",
        )
    if activations and tuple(map(activations.get, ("num_bits", "type", "dynamic"))) != (8, kind, True):
        raise CheckpointError(
            f"{module} has activations other than dynamic 8-bit {kind}s, which this toolkit does not read",
            f"Beside its weights it reads 16-bit activations and dynamic 8-bit {kind}s per token",
        )
    return Scheme(
        bits=bits,
        group_size=int(weights["group_size"]) if strategy == "group" else None,
        symmetric=bool(weights.get("symmetric", True)),
        activation_bits=8 if activations else None,
        fp8=kind == "float",
    )

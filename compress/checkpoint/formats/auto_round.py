"""AutoRound's own container (`quant_method: auto-round`), read only: integers packed as those of GPTQ or AWQ, 8-bit
floats, and the tensors of NVFP4, MXFP4 and MXFP8 as compressed-tensors has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.formats.awq import AWQ
from compress.checkpoint.formats.base import CONTAINERS, ReadOnly
from compress.checkpoint.formats.fp8 import FP8
from compress.checkpoint.formats.gptq import GPTQ, V1, V2
from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Int, Mxfp4, Mxfp8, Nvfp4, Scheme, Weight
from compress.checkpoint.weights.base import Get, StoredTensors, owners
from compress.common.errors import CheckpointError

PACKING = "packing_format"
FAKE = "auto_round:fake"
MINUS_ONE = "auto_round:auto_gptq", "auto_round:gptq", "auto"
"""Values of `packing_format` for zero points minus one; the others store them as they are."""
AS_THEY_ARE = "auto_round", "auto_round:gptqmodel", "auto_round:auto_awq", "auto_round:awq"
MARKS = ".qweight", ".weight_scale", ".weight_scale_inv"
SCALES = {"mx_fp": "e8m0 floor", "mx_fp_rceil": "e8m0 ceil"}
"""Rules of powers of two by `act_data_type`."""


def _is_awq(module: str, get: Get) -> bool:
    """Whether words hold codes of several outputs, not of several inputs."""
    return get(f"{module}.qweight").shape[1] != get(f"{module}.scales").shape[1]


def _fields(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The config with the overrides of a module: those of its name before those of a pattern."""
    extra = config.get("extra_config") or {}
    matching = [fields for pattern, fields in extra.items() if re.fullmatch(pattern, module)]
    overrides = [extra[module]] if module in extra else matching[:1]
    return {**config, **(overrides[0] if overrides else {})}


def _parse(module: str, fields: Mapping[str, Any]) -> Scheme:
    numbers, bits, group_size = fields.get("data_type", "int"), int(fields["bits"]), fields.get("group_size", 128)
    packing = fields.get(PACKING, MINUS_ONE[0])
    if numbers == "int" and packing not in (*MINUS_ONE, *AS_THEY_ARE):
        raise CheckpointError(f"integers packed as {packing!r} are not read", f"Write them again as {MINUS_ONE[0]}")
    if isinstance(group_size, list):
        rows, columns = group_size
        return BlockFp8((int(rows), int(columns)))
    found = {("nv_fp", 4): Nvfp4(), ("mx_fp", 4): Mxfp4(), ("mx_fp", 8): Mxfp8(), ("fp", 8): Fp8()}
    if numbers == "int":
        symmetric = bool(fields.get("sym", True)) and "awq" not in packing
        return Int(bits, None if group_size < 0 else int(group_size), symmetric)
    if (numbers, bits) not in found:
        raise CheckpointError(
            f"{module} is stored as AutoRound's {numbers} of {bits} bits, which this toolkit does not read",
            "Write it again as int, fp, nv_fp or mx_fp",
        )
    return found[numbers, bits]


def _rounding(config: Mapping[str, Any], names: frozenset[str]) -> list[str]:
    """Modules whose inputs may be rounded: quantized ones, or dense ones that hold rounded values."""
    if config.get(PACKING) != FAKE:
        return AUTO_ROUND.modules(names)
    blocks = config.get("block_name_to_quantize") or ()
    inside = tuple(f"{block}." for block in (blocks.split(",") if isinstance(blocks, str) else blocks))
    return [module for module in owners(names, ".weight") if module.startswith(inside) and "norm" not in module]


def _parse_inputs(fields: Mapping[str, Any]) -> Activations | None:
    """Rounding of inputs; None where they keep 16 bits."""
    bits, kind, size = fields.get("act_bits") or 16, fields.get("act_data_type"), fields.get("act_group_size") or 0
    if int(bits) > 8:
        return None
    if kind == "nv_fp4_with_static_gs":
        return Activations("float", bits, size, "e4m3", stored=".input_global_scale")
    if kind in SCALES:
        return Activations("float", bits, size, SCALES[kind])
    if kind != "fp":
        return Activations("int" if kind == "int" else "float", bits, size, "other")
    if not fields.get("act_dynamic", True):
        return Activations("float", bits, stored=".input_scale")
    return Activations("float", bits, size if size > 0 else None)


class AutoRound(ReadOnly):
    """AutoRound's own."""

    name = "auto-round"
    keys = (
        "act_bits act_data_type act_dynamic act_group_size act_sym activation_scheme backend bits "
        "block_name_to_quantize data_type extra_config fmt group_size packing_format regex_config sym weight_block_size"
    )

    def suffixes(self, scheme: Scheme | None = None) -> tuple[str, ...]:
        if scheme is None:
            forms = Int(), Fp8(), Nvfp4(), Mxfp4(), Mxfp8()
            return tuple(dict.fromkeys(suffix for form in forms for suffix in self.suffixes(form)))
        if isinstance(scheme, Int):
            return GPTQ.suffixes()
        return FP8.suffixes() if isinstance(scheme, Fp8 | BlockFp8) else scheme.suffixes

    def modules(self, names: Iterable[str]) -> list[str]:
        listed = frozenset(names)
        return sorted({module for mark in MARKS for module in owners(listed, mark)})

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module: the config's, with `extra_config` applied.

        Raises:
            CheckpointError: numbers or a packing that are not read.
        """
        return {module: _parse(module, _fields(config, module)) for module in modules}

    def inputs(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
        listed = frozenset(names)
        found = {module: _parse_inputs(_fields(config, module)) for module in _rounding(config, listed)}
        return {module: kind for module, kind in found.items() if kind is not None}

    def decode(self, module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> Weight:
        """The weight of one stored layer; `config` says whether zero points are stored minus one."""
        if isinstance(scheme, Int) and _is_awq(module, get):
            return AWQ.decode(module, get, scheme)
        if isinstance(scheme, Int):
            is_minus_one = (config or {}).get(PACKING, MINUS_ONE[0]) in MINUS_ONE
            return GPTQ.decode(module, get, scheme, {"checkpoint_format": V1 if is_minus_one else V2})
        if isinstance(scheme, Fp8 | BlockFp8):
            return FP8.decode(module, get, scheme)
        return scheme.read(StoredTensors(module, get))

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        if isinstance(scheme, Int):
            return (AWQ if _is_awq(module, get) else GPTQ).shape(module, get, scheme)
        return scheme.shape(StoredTensors(module, get))


AUTO_ROUND = CONTAINERS.register(order=10, aliases=["auto_round", "intel/auto-round"])(AutoRound())

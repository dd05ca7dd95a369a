"""compressed-tensors, the default: `pack-quantized` (2 to 8 bits, 16-bit activations), `int-quantized` (W8A8), 8-bit
floats per channel or block (`float-quantized`) and MXFP4.

Loaded unchanged by vLLM, SGLang and transformers with the compressed-tensors package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Int, Mxfp4, Scheme
from compress.checkpoint.weights.mxfp4 import GROUP_SIZE
from compress.common.errors import CheckpointError

NAME = "compressed-tensors"
LAYOUTS = {
    ("int", False): "pack-quantized",
    ("int", True): "int-quantized",
    ("float", False): "naive-quantized",
    ("float", True): "float-quantized",
    ("blocked float", False): "naive-quantized",
    ("microscaled float", False): "mxfp4-pack-quantized",
}
"""Names of layouts by the kind of codes, and whether activations are rounded."""
WRITER_VERSION = "0.17.0"
"""Layout generation named in the config: since then every width is packed as one dense bit stream."""


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffixes of a module's stored tensors."""
    return Int.suffixes


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when this format cannot hold a weight `[O, I]` of this scheme."""
    scheme.check_plain(NAME, *(numbers for numbers, _ in LAYOUTS))
    scheme.check(shape)


def modules(names: Iterable[str]) -> list[str]:
    """Quantized modules among tensor names."""
    return sorted(Int.modules(names))


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
    weights = {
        "num_bits": scheme.bits,
        "type": scheme.numbers.rpartition(" ")[2],
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    if isinstance(scheme, BlockFp8):
        weights |= {"strategy": "block", "block_structure": list(scheme.block)}
    if isinstance(scheme, Mxfp4):
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    activations = {
        "num_bits": 8,
        "type": scheme.numbers,
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
    }
    return {
        "targets": targets,
        "format": LAYOUTS[scheme.numbers, scheme.activations is not None],
        "weights": weights,
        "input_activations": activations if scheme.activations else None,
        "output_activations": None,
    }


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
    if (kind, bits, strategy, weights.get("group_size")) == ("float", 4, "group", GROUP_SIZE):
        return Mxfp4()
    if (kind, bits, strategy) == ("float", 8, "block") and (block := weights.get("block_structure")):
        return BlockFp8((int(block[0]), int(block[1])))
    readable = ("channel", "tensor") if kind == "float" else ("group", "channel", "tensor")
    if kind not in ("int", "float") or (kind == "float" and bits != 8) or strategy not in readable:
        raise CheckpointError(
            f"{module} is quantized as {bits}-bit {kind} by {strategy}, which this toolkit does not read",
            "It reads integer weights by group, channel or tensor, 8-bit floats by channel, tensor or block, and MXFP4",
        )
    if activations and tuple(map(activations.get, ("num_bits", "type"))) != (8, kind):
        raise CheckpointError(
            f"{module} has activations other than 8-bit {kind}s, which this toolkit does not read",
            f"Beside its weights it reads 16-bit activations and 8-bit {kind}s",
        )
    # Scales of inputs that were measured once are not used: those inputs keep 16 bits.
    rounds = bool(activations and activations.get("dynamic"))
    if kind == "float":
        return Fp8(Activations.FP8 if rounds else None)
    return Int(
        bits,
        int(weights["group_size"]) if strategy == "group" else None,
        bool(weights.get("symmetric", True)),
        Activations.INT8 if rounds else None,
    )

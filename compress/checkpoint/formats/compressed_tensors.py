"""compressed-tensors, the default: `pack-quantized` (2 to 8 bits), `int-quantized` (W8A8 per channel), 8-bit
floats per channel or block (`float-quantized`, `naive-quantized` without rounded inputs), NVFP4, MXFP4 and MXFP8.

Loaded unchanged by vLLM, SGLang and transformers with the compressed-tensors package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.base import (
    CONTAINERS,
    RUNTIME,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    Container,
    modules_by_scheme,
)
from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Int, Mxfp4, Mxfp8, Nvfp4, RotatedInputs, Scheme
from compress.checkpoint.weights.integer import INPUTS
from compress.checkpoint.weights.rotated_inputs import hadamard_matrix
from compress.common.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Layout:
    """Description of the weights of a form in config.json.

    Attributes:
        name: of the layout, where inputs keep 16 bits.
        type: of the numbers.
        strategy: which weights share a scale; empty where the scheme's group size says it.
        rounded_name: with rounded inputs, where codes are not packed; empty where the form has none.
        scale_dtype: of scales that are not floats of the model's dtype; empty where they are.
    """

    name: str
    type: str = "float"
    strategy: str = ""
    rounded_name: str = ""
    scale_dtype: str = ""


LAYOUTS = {
    Int.key: Layout("pack-quantized", "int", rounded_name="int-quantized"),
    Fp8.key: Layout("naive-quantized", rounded_name="float-quantized"),
    BlockFp8.key: Layout("naive-quantized", strategy="block"),
    Nvfp4.key: Layout("nvfp4-pack-quantized", strategy="tensor_group", scale_dtype="torch.float8_e4m3fn"),
    Mxfp4.key: Layout("mxfp4-pack-quantized", strategy="group", scale_dtype="torch.uint8"),
    Mxfp8.key: Layout("mxfp8-quantized", strategy="group", scale_dtype="torch.uint8"),
}
"""Layouts by the keys of forms."""
HELD = Int, Fp8, BlockFp8, Nvfp4, Mxfp4, Mxfp8
"""Forms that have a layout."""
ALL_SUFFIXES = tuple(dict.fromkeys(suffix for form in HELD for suffix in form.suffixes))
WRITER_VERSION = "0.17.0"
"""Layout generation named in the config: since then every width is packed as one dense bit stream."""


def _config_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    layout = LAYOUTS[scheme.key]
    more: dict[str, Any] = {"block_structure": list(scheme.block)} if isinstance(scheme, BlockFp8) else {}
    if layout.scale_dtype:
        more = {"scale_dtype": layout.scale_dtype, "zp_dtype": layout.scale_dtype}
    weights = {
        "num_bits": scheme.bits,
        "type": layout.type,
        "symmetric": scheme.symmetric,
        "strategy": layout.strategy or ("channel" if scheme.group_size is None else "group"),
        "group_size": scheme.group_size,
        "dynamic": False,
        **more,
    }
    activations = {
        "num_bits": scheme.activation_bits,
        "type": layout.type,
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
    }
    is_rounded = scheme.activations and not (isinstance(scheme, Int) and scheme.is_packed)
    return {
        "targets": targets,
        "format": layout.rounded_name if is_rounded else layout.name,
        "weights": weights,
        "input_activations": activations if scheme.activations else None,
        "output_activations": None,
    }


def _plain(scheme: Scheme) -> Scheme:
    """The form of the codes of a weight with rotated inputs; other forms themselves."""
    return scheme.inner if isinstance(scheme, RotatedInputs) else scheme


def _transform(order: int) -> str:
    """Name of the transform of inputs by Hadamard matrices of an order."""
    return f"hadamard{order}"


def _transform_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`transform_config` of rotated inputs: a Hadamard matrix at the inputs, its inverse in the stored weights."""
    orders = sorted({scheme.hadamard for scheme in schemes.values()} - {0})
    groups = {}
    for order in orders:
        members = [module for module, scheme in schemes.items() if scheme.hadamard == order]
        place = {"targets": _targets(members, {*schemes, *ignored}), "ignore": []}
        apply = [place | {"location": "input", "inverse": False}, place | {"location": "weight_input", "inverse": True}]
        fixed = {"randomize": False, "requires_grad": False, "precision": "torch.float32"}
        groups[_transform(order)] = {"type": "hadamard", "apply": apply, "head_dim": order, **fixed}
    return {"config_groups": groups} if groups else {}


def _targets(members: Collection[str], modules: Collection[str]) -> list[str]:
    """A pattern for each last part of the names of members where no other module ends with it, else their names."""
    leaves = sorted({module.rpartition(".")[2] for module in members})
    named = {module for module in modules if module.rpartition(".")[2] in leaves}
    return [rf"re:.*\b{leaf}$" for leaf in leaves] if named == {*members} else sorted(members)


def _find_group(module: str, groups: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The group of a module: its own name wins over a pattern, a pattern over the class."""
    matches: tuple[Callable[[str], bool], ...] = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
        lambda target: target in ("Linear", "Embedding"),
    )
    for match in matches:
        for group in groups:
            if any(match(target) for target in group.get("targets", ())):
                return group
    raise CheckpointError(f"no config group of quantization_config targets {module}, which is stored quantized")


def _parse_float(weights: Mapping[str, Any]) -> Scheme | None:
    """The form of floats in blocks, or under scales of its own; None where `weights` describes another."""
    given = weights.get("type"), int(weights["num_bits"]), weights.get("strategy"), weights.get("group_size")
    if (block := weights.get("block_structure")) and given == ("float", 8, "block", None):
        return BlockFp8((int(block[0]), int(block[1])))
    for form in (Nvfp4(), Mxfp4(), Mxfp8()):
        if given == ("float", form.bits, LAYOUTS[form.key].strategy, form.group_size):
            return form
    return None


def _parse_group(module: str, group: Mapping[str, Any]) -> Scheme:
    weights = group.get("weights") or {}
    kind, bits = weights.get("type", "int"), int(weights["num_bits"])
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if scheme := _parse_float({**weights, "strategy": strategy}):
        return scheme
    readable = ("channel", "tensor") if kind == "float" else ("group", "channel", "tensor")
    if kind not in ("int", "float") or (kind == "float" and bits != 8) or strategy not in readable:
        raise CheckpointError(
            f"{module} is quantized as {bits}-bit {kind} by {strategy}, which this toolkit does not read",
            "It reads integer weights by group, channel or tensor, 8-bit floats by channel, tensor or block, NVFP4, "
            "MXFP4 and MXFP8",
        )
    rounded = _parse_activations(group.get("input_activations"))
    if kind == "float":
        return Fp8(rounded if rounded == Activations.FP8 else None)
    return Int(
        bits,
        int(weights["group_size"]) if strategy == "group" else None,
        bool(weights.get("symmetric", True)),
        rounded if rounded in INPUTS else None,
    )


def _parse_inputs(group: Mapping[str, Any]) -> Activations | None:
    """Rounding of inputs that the scheme of a group does not have."""
    rounded = _parse_activations(group.get("input_activations"))
    weights = group.get("weights") or {}
    plain = weights.get("strategy") in (None, "channel", "tensor") or weights.get("type") == "int"
    own = INPUTS if weights.get("type", "int") == "int" else (Activations.FP8,)
    return None if plain and rounded in own else rounded


def _parse_activations(given: Mapping[str, Any] | None) -> Activations | None:
    """Rounding of inputs as `input_activations` describes it; None where they keep 16 bits."""
    if not given:
        return None
    numbers, bits, size = given.get("type", "int"), int(given["num_bits"]), given.get("group_size")
    strategy = given.get("strategy") or ("group" if size else "tensor")
    dynamic, symmetric = given.get("dynamic"), bool(given.get("symmetric", True))
    if strategy == "tensor_group" and dynamic == "local" and bits == 4:
        return Activations(numbers, bits, size, "e4m3", stored=".input_global_scale")
    if not dynamic and strategy == "tensor":
        return Activations(numbers, bits, None, symmetric=symmetric, stored=".input_scale")
    is_known = (numbers == "int" or bits in (4, 8)) and strategy in ("token", "group") and bool(dynamic)
    if not is_known:
        return Activations(numbers, bits, size, "other", symmetric)
    scales = "e8m0" if given.get("scale_dtype") == "torch.uint8" and size == 32 else "float"
    return Activations(numbers, bits, size if strategy == "group" else None, scales, symmetric)


class CompressedTensors(Container):
    """compressed-tensors."""

    name = "compressed-tensors"
    engines = RUNTIME, TRANSFORMERS, VLLM, SGLANG
    keys = "config_groups format global_compression_ratio kv_cache_scheme quantization_status transform_config"

    def suffixes(self, scheme: Scheme | None = None) -> tuple[str, ...]:
        return scheme.suffixes if scheme else ALL_SUFFIXES

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        _plain(scheme).check_plain(self.name)
        scheme.check(shape)

    def encode(self, module: str, weight: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        stored = super().encode(module, weight, dtype)
        order = weight.scheme.hadamard
        return stored | ({f"{module}.{_transform(order)}_input.weight": hadamard_matrix(order, dtype)} if order else {})

    def modules(self, names: Iterable[str]) -> list[str]:
        return sorted(Int.modules(names))

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` of config.json, with the keys that every reader accepts and no others.

        Args:
            schemes: by module. One scheme targets the class `Linear`; several name their modules.
            ignored: every linear module that stays dense, by full name.
        """
        grouped = modules_by_scheme({module: _plain(scheme) for module, scheme in schemes.items()})
        groups = {
            f"group_{number}": _config_group(scheme, ["Linear"] if len(grouped) == 1 else members)
            for number, (scheme, members) in enumerate(grouped.items())
        }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": self.name,
            "version": WRITER_VERSION,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": sorted(ignored),
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": _transform_config(schemes, ignored),
            "config_groups": groups,
        }

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module, from a `quantization_config` that any tool wrote.

        Raises:
            CheckpointError: a module that no group targets, or a form that is not read.
        """
        groups = list((config.get("config_groups") or {}).values())
        return {module: _parse_group(module, _find_group(module, groups)) for module in modules}

    def inputs(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
        """Rounding of the inputs of modules among tensor names that their schemes do not include."""
        groups = list((config.get("config_groups") or {}).values())
        found = {module: _parse_inputs(_find_group(module, groups)) for module in self.modules(names)}
        return {module: kind for module, kind in found.items() if kind is not None}


COMPRESSED_TENSORS = CONTAINERS.register(order=1)(CompressedTensors())

"""NVIDIA's ModelOpt (`quant_method: modelopt`, or `hf_quant_config.json`), read only: FP8, NVFP4 and MXFP8.

A scale of a tensor is a factor of its codes, and so is `weight_scale_2` of NVFP4's scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, SGLANG, VLLM, ReadOnly
from compress.checkpoint.weights import Activations, Fp8, Mxfp8, Nvfp4, Scheme
from compress.checkpoint.weights.base import Get, StoredTensors, Weight, row_scales
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.layouts import check_float_codes
from compress.checkpoint.weights.packing import unpack_bytes
from compress.common.errors import CheckpointError

SCALE, FACTOR, INPUT_SCALE = ".weight_scale", ".weight_scale_2", ".input_scale"
MIXED = "MIXED_PRECISION"
ALGORITHMS: Mapping[str, tuple[Scheme, Activations | None]] = {
    "FP8": (Fp8(), Activations("float", stored=INPUT_SCALE)),
    "FP8_PER_CHANNEL_PER_TOKEN": (Fp8(Activations.FP8), None),
    "NVFP4": (Nvfp4(), Activations("float", 4, 16, "e4m3", stored=INPUT_SCALE)),
    "W4A16_NVFP4": (Nvfp4(), None),
    "MXFP8": (Mxfp8(), Activations("float", 8, 32, "e8m0 ceil")),
}
"""Forms of weights, and rounding of inputs that they do not have, by `quant_algo`."""


def _algorithm(config: Mapping[str, Any], module: str) -> tuple[Scheme, Activations | None]:
    about = {**config, **(config.get("quantization") or {})}
    name = str(about.get("quant_algo"))
    if name == MIXED:
        name = str(((about.get("quantized_layers") or {}).get(module) or {}).get("quant_algo"))
    if name not in ALGORITHMS:
        raise CheckpointError(
            f"{module} is stored by ModelOpt's algorithm {name}, which this toolkit does not read",
            f"It reads {', '.join(ALGORITHMS)}",
        )
    return ALGORITHMS[name]


class ModelOpt(ReadOnly):
    """ModelOpt."""

    name = "modelopt"
    engines = RUNTIME, VLLM, SGLANG
    keys = "config_groups kv_cache_scheme producer quant_algo quantization quantized_layers"
    stored = ".weight", SCALE, FACTOR
    mark = SCALE

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module. Raises CheckpointError for an algorithm that is not read."""
        return {module: _algorithm(config, module)[0] for module in modules}

    def inputs(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
        """Rounding of the inputs of every module among tensor names that has what it needs."""
        listed = frozenset(names)
        found = {module: _algorithm(config, module)[1] for module in self.modules(listed)}
        return {
            module: kind
            for module, kind in found.items()
            if kind and (not kind.stored or module + kind.stored in listed)
        }

    def decode(self, module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> Weight:
        stored = StoredTensors(module, get)
        codes = stored[".weight"]
        if isinstance(scheme, Nvfp4):
            divisor = stored[FACTOR].float().reciprocal().reshape(1, 1)
            divisors = divisor.repeat(len(codes), 1)
            return CodedWeight(unpack_bytes(codes, scheme.bits), stored[SCALE], scheme, divisors=divisors)
        if isinstance(scheme, Fp8):
            check_float_codes(module, codes)
            return CodedWeight(codes, row_scales(stored[SCALE].float(), len(codes), 1), scheme)
        return scheme.read(stored)


MODELOPT = CONTAINERS.register(order=10)(ModelOpt())

"""8-bit floats as DeepSeek, Qwen and GLM publish them (`quant_method: fp8`): one scale per block, or per tensor.

Inputs are rounded to 8 bits too: by stored scales, or in groups as wide as blocks, with powers of two as scales where
`scale_fmt` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, SGLANG, TRANSFORMERS, VLLM, Container, single
from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Scheme
from compress.checkpoint.weights.base import Get, StoredTensors, about
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.layouts import ByteFloats, check_float_codes
from compress.common.errors import SchemeError

INPUT_SCALES = ".input_scale", ".activation_scale"
SCALES = (".weight_scale_inv", ".weight_scale")
"""Both are factors of the codes, whatever the first is called."""


class Fp8Container(Container):
    """8-bit floats in blocks or by tensor."""

    name = "fp8"
    engines = RUNTIME, TRANSFORMERS, VLLM, SGLANG
    keys = "activation_scheme fmt kv_cache_scheme weight_block_size"
    stored = ".weight", *SCALES

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raises SchemeError unless the scheme has blocks."""
        if not isinstance(scheme, BlockFp8):
            raise SchemeError(f"fp8 stores 8-bit floats in blocks, not {scheme}")

    def encode(self, module: str, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        with about(module):
            self.check(weight.scheme, weight.shape)
            stored = weight.tensors(dtype)
        return {f"{module}.weight": stored[".weight"], f"{module}{SCALES[0]}": stored[".weight_scale"]}

    def decode(self, module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> CodedWeight:
        """The weight of one stored layer; scales may be powers of two (e8m0)."""
        stored = StoredTensors(module, get)
        codes, found = stored[".weight"], stored.optional(SCALES[0])
        scales = stored[SCALES[1]] if found is None else found
        check_float_codes(module, codes)
        if not isinstance(scheme, ByteFloats):
            raise SchemeError(f"fp8 stores 8-bit floats, not {scheme}")
        return CodedWeight(codes, scheme.repeated(scales.float(), codes.shape), scheme)

    def modules(self, names: Iterable[str]) -> list[str]:
        return sorted({name.removesuffix(scale) for name in names for scale in SCALES if name.endswith(scale)})

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. Raises SchemeError for blocks of several sizes."""
        blocks = (scheme.block for scheme in schemes.values() if isinstance(scheme, BlockFp8))
        return {
            "quant_method": self.name,
            "activation_scheme": "dynamic",
            "weight_block_size": list(single(self, blocks, "size of blocks")),
            "modules_to_not_convert": sorted(ignored),
        }

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module: the same for all. Raises SchemeError for blocks that are none."""
        block = config.get("weight_block_size")
        scheme: Scheme = BlockFp8((int(block[0]), int(block[1]))) if block else Fp8()
        return dict[str, Scheme].fromkeys(modules, scheme)

    def inputs(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
        listed, block = frozenset(names), config.get("weight_block_size")
        if config.get("activation_scheme") == "static":
            stored = {
                module: [end for end in INPUT_SCALES if module + end in listed] for module in self.modules(listed)
            }
            return {module: Activations("float", stored=ends[0]) for module, ends in stored.items() if ends}
        scales = "e8m0 ceil" if config.get("scale_fmt") == "ue8m0" else "float"
        kind = Activations("float", 8, int(block[1]) if block else None, scales)
        return dict.fromkeys(self.modules(listed), kind)


FP8 = CONTAINERS.register(order=4)(Fp8Container())

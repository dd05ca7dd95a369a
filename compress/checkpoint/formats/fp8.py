"""8-bit floats as DeepSeek, Qwen and GLM publish them (`quant_method: fp8`): one scale per block, or per tensor.

Inputs are rounded to 8 bits too: by stored scales, or in groups as wide as blocks, with powers of two as scales where
`scale_fmt` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Scheme
from compress.checkpoint.weights.base import Get, StoredTensors, about, row_scales
from compress.checkpoint.weights.block_fp8 import BlockFp8Weight
from compress.checkpoint.weights.fp8 import Fp8Weight, check_codes
from compress.common.errors import SchemeError

NAME = "fp8"
INPUT_SCALES = ".input_scale", ".activation_scale"
SCALES = (".weight_scale_inv", ".weight_scale")
"""Both are factors of the codes, whatever the first is called."""


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffixes of a module's stored tensors."""
    return (".weight", *SCALES)


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError unless the scheme has blocks."""
    if not isinstance(scheme, BlockFp8):
        raise SchemeError(f"fp8 stores 8-bit floats in blocks, not {scheme}")


def encode(module: str, weight: BlockFp8Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of one linear layer, by full name."""
    with about(module):
        check(weight.scheme, weight.shape)
    return {f"{module}.weight": weight.qweight, f"{module}{SCALES[0]}": weight.block_scales}


def decode(
    module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None
) -> BlockFp8Weight | Fp8Weight:
    """The weight of one stored layer; scales may be powers of two (e8m0)."""
    stored = StoredTensors(module, get)
    codes, found = stored[".weight"], stored.optional(SCALES[0])
    scales = stored[SCALES[1]] if found is None else found
    check_codes(module, codes)
    if isinstance(scheme, BlockFp8):
        return BlockFp8Weight.of(codes, scales, scheme)
    if not isinstance(scheme, Fp8):
        raise SchemeError(f"fp8 stores 8-bit floats, not {scheme}")
    return Fp8Weight(codes, row_scales(scales.float(), codes.shape[0], 1), scheme)


def shape(module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
    """`(O, I)` of a stored layer, without decoding it."""
    rows, columns = get(f"{module}.weight").shape
    return rows, columns


def modules(names: Iterable[str]) -> list[str]:
    """Quantized modules among tensor names."""
    return sorted({name.removesuffix(scale) for name in names for scale in SCALES if name.endswith(scale)})


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. Raises SchemeError for blocks of several sizes."""
    blocks = {scheme.block for scheme in schemes.values() if isinstance(scheme, BlockFp8)}
    if len(blocks) != 1:
        raise SchemeError(
            f"fp8 stores one size of blocks for all layers, not {len(blocks)}", "Use --format compressed-tensors"
        )
    return {
        "quant_method": NAME,
        "activation_scheme": "dynamic",
        "weight_block_size": list(blocks.pop()),
        "modules_to_not_convert": sorted(ignored),
    }


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module: the same for all. Raises SchemeError for blocks that are none."""
    block = config.get("weight_block_size")
    scheme: Scheme = BlockFp8((int(block[0]), int(block[1]))) if block else Fp8()
    return dict[str, Scheme].fromkeys(modules, scheme)


def inputs(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Activations]:
    """Rounding of the inputs of every module among tensor names."""
    listed, block = frozenset(names), config.get("weight_block_size")
    if config.get("activation_scheme") == "static":
        stored = {module: [end for end in INPUT_SCALES if module + end in listed] for module in modules(listed)}
        return {module: Activations("float", stored=ends[0]) for module, ends in stored.items() if ends}
    scales = "e8m0 ceil" if config.get("scale_fmt") == "ue8m0" else "float"
    kind = Activations("float", 8, int(block[1]) if block else None, scales)
    return dict.fromkeys(modules(listed), kind)

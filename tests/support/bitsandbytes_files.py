"""Weights as bitsandbytes stores them, made from its documented layout without the library."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from folders import change_config, change_tensors, private_copy
from torch import Tensor

from compress.checkpoint.weights.forms import BNB_TABLES

Pack = Callable[[Tensor], dict[str, Tensor]]
"""Gives the tensors of a weight, by suffix of the module's name."""
NESTED_BLOCK = 256


def pack_4bit(weight: Tensor, kind: str = "nf4", block: int = 64, is_nested: bool = False) -> dict[str, Tensor]:
    """The nearest codes under the largest magnitude of each block, with double quantization or without."""
    table = torch.tensor(BNB_TABLES[kind])
    blocks = weight.float().flatten().view(-1, block)
    largest = blocks.abs().amax(1)
    codes = ((blocks / largest.unsqueeze(1)).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8).flatten()
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {".weight": (codes[::2] << 4 | codes[1::2]).unsqueeze(1), ".weight.quant_map": table}
    tensors[".weight.absmax"] = largest
    if is_nested:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(largest.mean())}
        tensors |= nested_scales(largest - torch.tensor(state["nested_offset"]))
    said = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {f".weight.quant_state.bitsandbytes__{kind}": said}


def nested_scales(scales: Tensor) -> dict[str, Tensor]:
    table = torch.linspace(-1, 1, 256)
    parts = scales.split(NESTED_BLOCK)
    outer = torch.stack([part.abs().max() for part in parts])
    codes = [(part.unsqueeze(-1) / most - table).abs().argmin(-1) for part, most in zip(parts, outer, strict=True)]
    own = {".weight.absmax": torch.cat(codes).to(torch.uint8)}
    return own | {".weight.nested_absmax": outer, ".weight.nested_quant_map": table}


def pack_int8(weight: Tensor) -> dict[str, Tensor]:
    """8-bit integers with the largest magnitude of each row."""
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / largest).unsqueeze(1)).round().to(torch.int8)
    return {".weight": codes, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}


CASES: dict[str, tuple[Pack, dict[str, object]]] = {
    "nf4": (pack_4bit, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4 twice": (lambda weight: pack_4bit(weight, is_nested=True), {"bnb_4bit_quant_type": "nf4"}),
    "nf4 blocks of 32": (lambda weight: pack_4bit(weight, block=32), {"bnb_4bit_quant_type": "nf4"}),
    "fp4": (lambda weight: pack_4bit(weight, "fp4"), {"bnb_4bit_quant_type": "fp4"}),
    "fp4 twice": (lambda weight: pack_4bit(weight, "fp4", is_nested=True), {"load_in_4bit": True}),
    "int8": (pack_int8, {"load_in_8bit": True}),
}
"""Ways to store a weight, with their entries of `quantization_config`."""


def change_layers(tensors: dict[str, Tensor], pack: Pack) -> None:
    """Packs all projections among the tensors of a model."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        packed = pack(tensors.pop(name))
        tensors |= {module + suffix: tensor for suffix, tensor in packed.items()}


def pack_model_as(case: str, dense: Path, out: Path) -> Path:
    """A copy of a dense checkpoint with its projections packed."""
    pack, entries = CASES[case]
    change_tensors(private_copy(dense, out), lambda tensors: change_layers(tensors, pack))
    return change_config(out, quantization_config={"quant_method": "bitsandbytes", **entries})

"""Checkpoints of bitsandbytes (`quant_method: bitsandbytes`): NF4 and FP4, and 8-bit integers (LLM.int8()). Read only.

Blocks of 4-bit codes run through the matrix row by row. Their scales may be 8-bit places in a table themselves, times a
float32 of 256 scales and above an offset (double quantization, arXiv:2305.14314, section 3). Inputs keep 16 bits: the
outliers of LLM.int8() (arXiv:2208.07339) and the rounding of all other inputs are of its products, not of its weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, TRANSFORMERS, VLLM, ReadOnly
from compress.checkpoint.weights import Bnb4, Int, Scheme
from compress.checkpoint.weights.base import Get, StoredTensors, owners
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.forms import BNB_TABLES
from compress.common.errors import CheckpointError, SchemeError

BLOCK_SCALES, ROW_SCALES, LAYOUT = ".weight.absmax", ".SCB", ".weight_format"
STATES = {kind: f".weight.quant_state.bitsandbytes__{kind}" for kind in BNB_TABLES}
"""Suffixes of bytes of JSON, by kind of codes."""
NESTED = ".weight.nested_absmax", ".weight.nested_quant_map"
SUFFIXES = ".weight", BLOCK_SCALES, ".weight.quant_map", *NESTED, *STATES.values(), ROW_SCALES, LAYOUT
ROWS = 0
"""Value of `weight_format` for rows that follow each other in memory."""
LARGEST = 127


@dataclass(frozen=True, slots=True)
class QuantState:
    """Description of 4-bit codes in the JSON of a module.

    Attributes:
        block: codes that share a scale.
        nested_block: scales that share one, with double quantization.
        offset: of scales, with double quantization.
    """

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float

    @classmethod
    def read(cls, stored: StoredTensors, kind: str) -> QuantState:
        """Raises CheckpointError where it is missing or of another kind, ValueError for no JSON."""
        fields = json.loads(bytes(stored[STATES[kind]].flatten().view(torch.uint8).tolist()))
        if not isinstance(fields, dict) or fields.get("quant_type") != kind:
            raise CheckpointError(f"the quantization state of {stored.module} is not that of {kind}")
        rows, columns = map(int, fields["shape"])
        nested, offset = int(fields.get("nested_blocksize", 0)), float(fields.get("nested_offset", 0))
        return cls((rows, columns), int(fields["blocksize"]), nested, offset)


def _codes(stored: StoredTensors, state: QuantState, scheme: Bnb4) -> Tensor:
    """Codes `[O, I]`, of which the first of a byte is its upper half. Raises CheckpointError for others than stated."""
    (rows, columns), module = state.shape, stored.module
    packed, table = stored[".weight"], stored[".weight.quant_map"]
    if state.block != scheme.group_size or 2 * packed.nbytes != rows * columns or min(rows, columns) < 1:
        raise CheckpointError(
            f"{module} has {packed.nbytes} bytes for {rows} x {columns} codes, blocks of {state.block}"
        )
    if not torch.equal(table.float(), torch.tensor(scheme.code_values)):
        raise CheckpointError(f"{module} has another table of numbers than {scheme.kind}")
    pairs = packed.flatten().view(torch.uint8)
    return torch.stack((pairs >> 4, pairs & 15), -1).view(rows, columns)


def _scales(stored: StoredTensors, state: QuantState, groups: int) -> Tensor:
    """Float32 `[groups]`, as bitsandbytes computes them."""
    scales = stored[BLOCK_SCALES].flatten()
    if len(scales) != groups:
        raise CheckpointError(f"{stored.module} has {len(scales)} scales for {groups} blocks")
    if scales.is_floating_point():
        return scales.float()
    outer, table = (stored[suffix].flatten().float() for suffix in NESTED)
    if scales.dtype != torch.uint8 or len(table) != 256 or len(outer) != -(-groups // max(1, state.nested_block)):
        nested = f"{len(outer)} outer scales and a table of {len(table)} numbers"
        raise CheckpointError(f"{stored.module} has {nested} for {groups} scales in {scales.dtype}")
    repeated = outer.repeat_interleave(state.nested_block)[:groups]
    return table[scales.int()] * repeated + torch.tensor(state.offset)


def _integers(stored: StoredTensors, scheme: Int) -> CodedWeight:
    """8-bit integers between -127 and 127 of the largest magnitude of a row."""
    codes, largest, layout = stored[".weight"], stored[ROW_SCALES], stored.optional(LAYOUT)
    if layout is not None and layout.flatten().tolist() != [ROWS]:
        raise CheckpointError(f"{stored.module} is not stored row by row", "Save it with a newer bitsandbytes")
    if codes.dtype != torch.int8 or codes.dim() != 2 or largest.numel() != len(codes):
        raise CheckpointError(f"{stored.module} should hold int8 codes and a scale per row, not {codes.dtype}")
    scales = (largest.float() / LARGEST).view(-1, 1)
    unsigned = codes.contiguous().view(torch.uint8) ^ scheme.zero
    return scheme.weight(unsigned, scales)


class BitsAndBytes(ReadOnly):
    """bitsandbytes."""

    name = "bitsandbytes"
    engines = RUNTIME, TRANSFORMERS, VLLM
    keys = (
        "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type "
        "bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold "
        "load_in_4bit load_in_8bit"
    )
    stored = SUFFIXES

    def modules(self, names: Iterable[str]) -> list[str]:
        listed = frozenset(names)
        return sorted({*owners(listed, BLOCK_SCALES), *owners(listed, ROW_SCALES)})

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module; only its tensors tell the size of blocks. Raises SchemeError for other codes."""
        if config.get("load_in_8bit"):
            return dict[str, Scheme].fromkeys(modules, Int(8, None))
        return dict[str, Scheme].fromkeys(modules, Bnb4(str(config.get("bnb_4bit_quant_type", "fp4"))))

    def decode(self, module: str, get: Get, scheme: Scheme, config: Mapping[str, Any] | None = None) -> CodedWeight:
        """The weight of one stored layer. Raises CheckpointError or SchemeError for tensors that contradict."""
        stored = StoredTensors(module, get)
        if isinstance(scheme, Int):
            return _integers(stored, scheme)
        if not isinstance(scheme, Bnb4):
            raise SchemeError(f"bitsandbytes stores 4-bit codes, not {scheme}")
        state = QuantState.read(stored, scheme.kind)
        rows, columns = state.shape
        groups = rows * scheme.num_groups(columns)
        return CodedWeight(_codes(stored, state, scheme), _scales(stored, state, groups).view(rows, -1), scheme)

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        stored = StoredTensors(module, get)
        if isinstance(scheme, Bnb4):
            return QuantState.read(stored, scheme.kind).shape
        rows, columns = stored[".weight"].shape
        return rows, columns


BITSANDBYTES = CONTAINERS.register(order=10)(BitsAndBytes())

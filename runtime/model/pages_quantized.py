"""Pages of quantized keys and values, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import CODE_BITS, METADATA_BITS, KVCacheScheme
from compress.checkpoint.kv_numerics import QuantizedHeads, dequantize_heads, quantize_heads
from runtime.model.block_memory import BlockField, BlockMemory
from runtime.model.config import DecoderConfig


class QuantizedPages:
    """Codes `[block_size, kv_heads, bytes]` and their scales `[block_size, kv_heads, 1 or 2]` (with an offset, if there
    is one) per block, of keys and of values. What is gathered is dequantized.

    Codes of 4 bits lie two in a byte: dimension d in the low half of byte d, d + D / 2 in its high half.
    """

    def __init__(
        self,
        config: DecoderConfig,
        scheme: KVCacheScheme,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        parts = (("key", scheme.key_format), ("value", scheme.value_format))
        fields: dict[str, BlockField] = {}
        for name, format in parts:
            places = (block_size, config.num_kv_heads)
            fields[f"{name}_codes"] = BlockField((*places, config.head_dim * CODE_BITS[format] // 8), torch.uint8)
            fields[f"{name}_scales"] = BlockField((*places, METADATA_BITS[format] // 16), torch.float16)
        self.memory = BlockMemory(fields, config.num_layers, num_blocks, device, num_host_blocks)
        self.dtype = dtype
        self._key, self._value = (_Part(self.memory, name, format) for name, format in parts)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        self._key.write(layer, slots, key)
        self._value.write(layer, slots, value)

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._key.gather(layer, block_ids, self.dtype), self._value.gather(layer, block_ids, self.dtype)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.memory.move_tokens(sources, targets)


class _Part:
    """Keys, or values, of all layers."""

    def __init__(self, memory: BlockMemory, name: str, format: str) -> None:
        self.format = format
        self.codes, self.scales = memory.tensors[f"{name}_codes"], memory.tensors[f"{name}_scales"]

    def write(self, layer: int, slots: Tensor, heads: Tensor) -> None:
        quantized = quantize_heads(heads, self.format)
        metadata = [quantized.scale] if quantized.offset is None else [quantized.scale, quantized.offset]
        codes = pack_halves(quantized.codes) if CODE_BITS[self.format] == 4 else quantized.codes
        self.codes[layer].flatten(0, 1).index_copy_(0, slots, codes)
        self.scales[layer].flatten(0, 1).index_copy_(0, slots, torch.stack(metadata, -1))

    def gather(self, layer: int, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
        codes = self.codes[layer].index_select(0, block_ids).flatten(0, 1)
        scale, *offset = self.scales[layer].index_select(0, block_ids).flatten(0, 1).unbind(-1)
        codes = unpack_halves(codes) if CODE_BITS[self.format] == 4 else codes
        return dequantize_heads(QuantizedHeads(codes, scale, offset[0] if offset else None), dtype)


def pack_halves(codes: Tensor) -> Tensor:
    """4-bit codes `[..., D]` as bytes `[..., D / 2]`."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def unpack_halves(codes: Tensor) -> Tensor:
    """The inverse of `pack_halves`."""
    return torch.cat((codes & 15, codes >> 4), -1)

"""Keys and values in pages, addressed by block and slot: what a layout must do, and the one that quantizes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from runtime.model.block_memory import BlockField, BlockMemory
from runtime.model.config import DecoderConfig


class KVPages(Protocol):
    """A layout of keys and values over a block memory.

    A backend with a layout of its own chooses the fields of its memory and their order; copying, clearing, saving in
    host memory and restoring are the memory's and work for any fields. Its numbers follow the scheme
    (`compress.checkpoint.kv_numerics`), so that all layouts hold the same codes. A slot is written once; after that its
    content moves with its block, or alone where a branch of guesses is kept. An attention that reads `memory.tensors`
    itself needs `gather` for tests only. Whether keys are turned (`KVCache.turn`) is not the layout's business: it
    stores what it is given.

    Attributes:
        memory: the blocks.
        dtype: of what is written and gathered.
    """

    memory: BlockMemory
    dtype: torch.dtype

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value `[T, kv_heads, D]`, at int64 slots `[T]`; slot = block id * block_size
        + offset."""
        ...

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value `[n * block_size, kv_heads, D]` of blocks `[n]`, in their order, as copies."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Puts what stands at some slots to others, in all layers. No target is the source of a later move."""
        ...


class ExactPages:
    """Keys and values in the model's dtype, as two tensors of `[block_size, kv_heads, D]` per block."""

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        field = BlockField((block_size, config.num_kv_heads, config.head_dim), dtype)
        fields = {"keys": field, "values": field}
        self.memory = BlockMemory(fields, config.num_layers, num_blocks, device, num_host_blocks)
        self.dtype = dtype
        keys, values = self.memory.tensors["keys"], self.memory.tensors["values"]
        self._pages = list(zip(keys, values, strict=True))
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._pages]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._pages[layer]
        return keys.index_select(0, block_ids).flatten(0, 1), values.index_select(0, block_ids).flatten(0, 1)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.memory.move_tokens(sources, targets)

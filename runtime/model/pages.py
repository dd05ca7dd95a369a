"""Keys and values in pages: one tensor for all layers, addressed by block and slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.model.config import DecoderConfig
from runtime.step import BlockCopy, BlockOffload, BlockRestore


class KVPages:
    """Storage for `num_blocks` blocks of `block_size` tokens in every layer, and for some more in host memory.

    Memory is not initialized. Invariant: a slot that attention may gather was written, or was cleared when its block
    was taken into use; so what an earlier owner left (even NaN) never reaches another sequence.

    Attributes:
        data: `[layers, 2, num_blocks, block_size, kv_heads, head_dim]`, keys before values.
        host: `[num_host_blocks, layers, 2, block_size, kv_heads, head_dim]`, pinned when `data` is on a GPU.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        host_shape = (num_host_blocks, *shape[:2], *shape[3:])
        self.host = torch.empty(host_shape, dtype=dtype, pin_memory=device.type == "cuda" and num_host_blocks > 0)
        self.num_blocks, self.block_size = num_blocks, block_size
        self._pages = [(keys, values) for keys, values in self.data]
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self.data]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value `[T, kv_heads, D]` at slots `[T]`; slot = block id * block_size + offset."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value `[n * block_size, kv_heads, D]` of blocks `[n]`, in their order."""
        keys, values = self._pages[layer]
        return keys.index_select(0, block_ids).flatten(0, 1), values.index_select(0, block_ids).flatten(0, 1)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies the first `num_tokens` slots of blocks to others, all read before any is written."""
        read = [self.data[:, :, copy.source, : copy.num_tokens].clone() for copy in copies]
        for copy, content in zip(copies, read, strict=True):
            self.data[:, :, copy.target, : copy.num_tokens] = content
            self.data[:, :, copy.target, copy.num_tokens :] = 0

    def offload(self, offloads: Sequence[BlockOffload]) -> None:
        """Saves whole blocks in host memory. Only `restore` reads it, on the same stream, so nobody has to wait."""
        for offload in offloads:
            self.host[offload.slot].copy_(self.data[:, :, offload.block].contiguous(), non_blocking=True)

    def restore(self, restores: Sequence[BlockRestore]) -> None:
        """Fills whole blocks with what was saved."""
        for restore in restores:
            self.data[:, :, restore.block] = self.host[restore.slot].to(self.data.device, non_blocking=True)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with zeros, in every layer."""
        for block in block_ids:
            self.data[:, :, block] = 0

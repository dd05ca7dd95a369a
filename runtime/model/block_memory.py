"""Memory in blocks, for any layout of keys and values: named tensors whose blocks move as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.step import BlockCopy, BlockOffload, BlockRestore
from runtime.upload import upload


@dataclass(frozen=True, slots=True)
class BlockField:
    """What a layout keeps of each block in each layer: a tensor of this shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BlockMemory:
    """Storage for `num_blocks` blocks in every layer, and for some more in host memory.

    Memory is not initialized. Invariant: a slot that attention may read was written, or was cleared when its block was
    taken into use; so what an earlier owner left (even NaN) never reaches another sequence. Hence a layout must read
    bytes that are all zero as finite numbers.

    Args:
        fields: what a block consists of, by name.

    Attributes:
        tensors: by name, `[layers, num_blocks, *shape]`.
        host: by name, `[num_host_blocks, layers, *shape]`, pinned beside a GPU.
    """

    def __init__(
        self,
        fields: Mapping[str, BlockField],
        num_layers: int,
        num_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        pinned = device.type == "cuda" and num_host_blocks > 0
        self.num_blocks, self.device = num_blocks, device
        self.tensors = {
            name: torch.empty((num_layers, num_blocks, *field.shape), dtype=field.dtype, device=device)
            for name, field in fields.items()
        }
        self.host = {
            name: torch.empty((num_host_blocks, num_layers, *field.shape), dtype=field.dtype, pin_memory=pinned)
            for name, field in fields.items()
        }

    @property
    def nbytes(self) -> int:
        """On the device, host memory left out."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks to others, all read before any is written.

        What stands behind a copy's `num_tokens` was written or cleared for its source, so it is as good as zeros.
        """
        if not copies:
            return
        sources = upload((copy.source for copy in copies), self.device)
        targets = upload((copy.target for copy in copies), self.device)
        for tensor in self.tensors.values():
            tensor.index_copy_(1, targets, tensor.index_select(1, sources))

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves single tokens between slots (block * block_size + offset), all read before any is written; for layouts
        whose fields begin with the tokens of a block."""
        read, written = upload(sources, self.device), upload(targets, self.device)
        for tensor in self.tensors.values():
            slots = tensor.flatten(1, 2)
            slots.index_copy_(1, written, slots.index_select(1, read))

    def offload(self, offloads: Iterable[BlockOffload]) -> None:
        """Saves blocks in host memory. Only `restore` reads it, on the same stream, so nobody has to wait."""
        for offload in offloads:
            for name, tensor in self.tensors.items():
                self.host[name][offload.slot].copy_(tensor[:, offload.block].contiguous(), non_blocking=True)

    def restore(self, restores: Iterable[BlockRestore]) -> None:
        """Fills blocks with what was saved."""
        for restore in restores:
            for name, tensor in self.tensors.items():
                tensor[:, restore.block] = self.host[name][restore.slot].to(tensor.device, non_blocking=True)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with zeros, in every layer. One after the other: on a CPU that takes a tenth of the time of an
        index, and for a GPU no index has to cross."""
        for tensor in self.tensors.values():
            for block_id in block_ids:
                tensor[:, block_id].zero_()

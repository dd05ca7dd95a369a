"""Attention over its own pages by compiled code (`attention.h`), for one step."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from compress.cpu.binding import BEST, library
from runtime.backends.cpu.kv_pages import CpuPages, token_stride
from runtime.core.batch import AttentionGroup, Batch


class PagedAttentionCall(ctypes.Structure):
    """`PagedAttention` of attention.h."""

    _fields_ = (
        ("pages", c_void_p),
        ("heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("query", c_void_p),
        ("query_row", c_int64),
        ("out", c_void_p),
        ("num_spans", c_int64),
        ("spans", c_void_p),
        ("blocks", c_void_p),
        ("ancestors", c_void_p),
    )


class CpuAttention:
    """As `PagedAttention`: stores the step's keys and values, then all spans of all sequences attend in one call.

    Args:
        windows: sliding window of every layer; None is none.
        hadamard: keys are stored Hadamard-rotated (`KVCacheScheme.rotate`); then queries are rotated in place, too.
        instruction_set: of the compiled code.

    Attributes:
        call: what one call needs that all layers share.

    Raises:
        ValueError: an instruction set that this machine lacks, when it is called.
    """

    def __init__(
        self,
        pages: CpuPages,
        batch: Batch,
        windows: tuple[int | None, ...],
        hadamard: bool = False,
        instruction_set: int = BEST,
    ) -> None:
        native = library()
        if native is None:
            raise ValueError("there is no compiled library")
        self._attend = native.paged_attention
        self._attend.argtypes, self._attend.restype = (c_void_p, c_int), c_int
        self.hadamard, self.pages, self.batch, self.windows = hadamard, pages, batch, windows
        self.instruction_set = instruction_set
        self._spans = torch.tensor(_spans(batch.groups), dtype=torch.int64)
        self._blocks = torch.cat([group.blocks for group in batch.groups])
        self._ancestors = _ancestors(batch.groups)
        self.call = PagedAttentionCall(
            num_spans=len(self._spans),
            spans=self._spans.data_ptr(),
            blocks=self._blocks.data_ptr(),
            ancestors=None if self._ancestors is None else self._ancestors.data_ptr(),
            scale=pages.head_dim**-0.5,
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = query if self.hadamard else None
        self.pages.store(layer, self.batch.slots, key, value, queries, self.instruction_set)
        out = query.new_empty(query.shape)
        call = self.call
        call.pages = ctypes.addressof(self.pages.addresses[layer])
        call.heads, call.window = query.shape[1], self.windows[layer] or 0
        call.query, call.query_row, call.out = query.data_ptr(), token_stride(query), out.data_ptr()
        if self._attend(ctypes.addressof(call), self.instruction_set):
            raise ValueError(f"this machine lacks instruction set {self.instruction_set}")
        return out


def _spans(groups: tuple[AttentionGroup, ...]) -> list[tuple[int, int, int, int]]:
    """First row, number of tokens, first block in the table of all groups, and first position of every sequence."""
    spans, block = [], 0
    for group in groups:
        num_tokens = (group.rows.stop - group.rows.start) // group.num_sequences
        num_blocks = len(group.blocks) // group.num_sequences
        for index, position in enumerate(group.positions[::num_tokens].tolist()):
            spans.append((group.rows.start + index * num_tokens, num_tokens, block + index * num_blocks, position))
        block += len(group.blocks)
    return spans


def _ancestors(groups: tuple[AttentionGroup, ...]) -> Tensor | None:
    """Ancestor bits of every row, 0 for plain causal attention; None when all rows are causal."""
    if all(group.ancestors is None for group in groups):
        return None
    bits = [torch.zeros_like(group.positions) if group.ancestors is None else group.ancestors for group in groups]
    return torch.cat(bits)

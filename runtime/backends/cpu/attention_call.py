"""Arguments of compiled attention (`attention.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from compress.cpu.binding import struct_fields
from runtime.core.batch import AttentionGroup


class PagedAttentionCall(ctypes.Structure):
    """`PagedAttention` of attention.h."""

    _fields_ = struct_fields(
        "pointer pages",
        "int64 heads window",
        "float scale",
        "pointer query",
        "int64 query_row",
        "pointer out",
        "int64 num_spans",
        "pointer spans blocks ancestors sink_logits",
        "int64 chunk",
        "float softcap",
        "int32 wide",
    )


def spans_of(groups: Sequence[AttentionGroup]) -> list[tuple[int, int, int, int]]:
    """Returns first row, tokens, first block in the table of all groups and first position of every sequence."""
    spans, block = [], 0
    for group in groups:
        num_tokens = (group.rows.stop - group.rows.start) // group.num_sequences
        num_blocks = len(group.blocks) // group.num_sequences
        for index, position in enumerate(group.positions[::num_tokens].tolist()):
            spans.append((group.rows.start + index * num_tokens, num_tokens, block + index * num_blocks, position))
        block += len(group.blocks)
    return spans


def ancestors_of(groups: Sequence[AttentionGroup]) -> Tensor | None:
    """Returns the ancestor bits of every row, 0 for plain causal attention; None when all rows are causal."""
    if all(group.ancestors is None for group in groups):
        return None
    bits = [torch.zeros_like(group.positions) if group.ancestors is None else group.ancestors for group in groups]
    return torch.cat(bits)

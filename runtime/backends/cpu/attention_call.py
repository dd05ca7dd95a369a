"""Arguments of compiled attention (`attention.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from runtime.core.batch import AttentionGroup


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
        ("sink_logits", c_void_p),
        ("chunk", c_int64),
        ("softcap", c_float),
        ("wide", c_int32),
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

"""Rows of a step by sequence, for tests that lay out sequences or groups themselves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.core.batch import AttentionGroup, RaggedRows


def ragged_rows(tables: Sequence[Tensor], positions: Sequence[Tensor], ancestors: Tensor | None = None) -> RaggedRows:
    """Rows of sequences with these block tables and positions among their keys.

    Args:
        ancestors: of all rows; None where no sequence has a tree.
    """
    device = positions[0].device
    lengths = tuple((len(each), int(each.amax()) + 1) for each in positions)
    if ancestors is not None:
        lengths = tuple((len(each), int(each[0]) + len(each)) for each in positions)
    starts = torch.tensor([0, *(tokens for tokens, _ in lengths)]).cumsum(0)
    firsts = torch.tensor([0, *(len(table) for table in tables[:-1])]).cumsum(0)
    longest, num_keys = (max(column) for column in zip(*lengths, strict=True))
    return RaggedRows(
        starts.to(device),
        firsts.to(device),
        torch.cat(list(tables)).to(device),
        torch.cat(list(positions)),
        None if ancestors is None else ancestors.to(device),
        longest,
        num_keys,
        lengths,
    )


def rows_of(groups: Sequence[AttentionGroup]) -> RaggedRows:
    """Rows of the sequences of groups."""
    tables = [table for group in groups for table in group.blocks.view(group.num_sequences, -1)]
    positions = [places for group in groups for places in group.positions.view(group.num_sequences, -1)]
    if all(group.ancestors is None for group in groups):
        return ragged_rows(tables, positions)
    bits = [torch.zeros_like(group.positions) if group.ancestors is None else group.ancestors for group in groups]
    return ragged_rows(tables, positions, torch.cat(bits))

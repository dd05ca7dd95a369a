"""The table of tensor types; a group of types is one file with a tuple `TYPES`."""

from __future__ import annotations

from torch import Tensor

from compress.checkpoint.gguf.types import k, legacy, plain, tables, ternary, vectors
from compress.checkpoint.gguf.types.base import BlockType
from compress.common.errors import CheckpointError

ALL_TYPES = (*plain.TYPES, *legacy.TYPES, *k.TYPES, *tables.TYPES, *ternary.TYPES, *vectors.TYPES)
BY_CODE = {each.code: each for each in ALL_TYPES}
BY_NAME = {each.name: each for each in ALL_TYPES}

UNREAD = {41: "q1_0"}
"""Types that are known and not read."""

DEQUANTIZED_VALUES = 2**20
"""Values that are dequantized at one time."""


def find_type(code: int) -> BlockType:
    """Returns the type with this number. Raises CheckpointError for one that is not read, or by a package that is
    missing."""
    if code in BY_CODE:
        kind = BY_CODE[code]
        if kind.name in vectors.NAMES:
            vectors.check_installed(kind.name)
        return kind
    name = f"{UNREAD[code]} (number {code})" if code in UNREAD else f"number {code}"
    raise CheckpointError(
        f"tensors of type {name} are not read", f"Choose a file of these types: {', '.join(sorted(BY_NAME))}"
    )


def dequantize(blocks: Tensor, kind: BlockType) -> Tensor:
    """Returns the values of rows of blocks.

    Args:
        blocks: uint8 `[R, B * nbytes]`.

    Returns:
        float32 `[R, B * size]`.
    """
    import torch

    flat = blocks.reshape(-1, kind.nbytes)
    values = torch.empty(len(flat), kind.size, dtype=torch.float32)
    step = max(1, DEQUANTIZED_VALUES // kind.size)
    for out, part in zip(values.split(step), flat.split(step), strict=True):
        out.copy_(kind.dequantize(part))
    return values.view(len(blocks), -1)

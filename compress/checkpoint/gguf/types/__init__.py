"""The table of tensor types; a group of types is one file with a tuple `TYPES`."""

from __future__ import annotations

from torch import Tensor

from compress.checkpoint.gguf.types import k, legacy, plain, tables, ternary
from compress.checkpoint.gguf.types.base import BlockType
from compress.common.errors import CheckpointError

ALL_TYPES = (*plain.TYPES, *legacy.TYPES, *k.TYPES, *tables.TYPES, *ternary.TYPES)
BY_CODE = {each.code: each for each in ALL_TYPES}
BY_NAME = {each.name: each for each in ALL_TYPES}

UNREAD = {
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    29: "iq1_m",
    41: "q1_0",
}
"""Types that are known and not read: vector codebooks of llama.cpp below 4 bits."""

DEQUANTIZED_VALUES = 2**20
"""Values that are dequantized at one time."""


def find_type(code: int) -> BlockType:
    """Returns the type with this number. Raises CheckpointError for one that is not read."""
    if code in BY_CODE:
        return BY_CODE[code]
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

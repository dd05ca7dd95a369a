"""Tensor types of GGUF; types that are alike share a file, which registers them."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from compress.checkpoint.gguf.types import k, legacy, tables
from compress.checkpoint.gguf.types.base import BLOCK_TYPES, BlockType, Codec
from compress.common.errors import CheckpointError

CODECS: dict[str, Codec] = {**k.CODECS, **legacy.CODECS, **tables.CODECS}
"""Codecs of the types that are weight forms."""

UNREAD = {41: "q1_0"}
"""Types that are known and not read."""
INSTALL = "pip install 'compress-runtime[gguf]'"

DEQUANTIZED_VALUES = 2**20
"""Values that are dequantized at one time."""


def find_type(code: int) -> BlockType:
    """Returns the type with this number. Raises CheckpointError for one that is not read, or by a package that is
    missing."""
    kind = next((each for each in BLOCK_TYPES.values() if each.code == code), None)
    if kind is None:
        name = f"{UNREAD[code]} (number {code})" if code in UNREAD else f"number {code}"
        raise CheckpointError(
            f"tensors of type {name} are not read", f"Choose a file of these types: {', '.join(BLOCK_TYPES)}"
        )
    if kind.package and find_spec(kind.package) is None:
        raise CheckpointError(
            f"tensors of type {kind.name} are read by the package {kind.package}, which is missing", INSTALL
        )
    return kind


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

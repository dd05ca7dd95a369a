"""Layout in which the C kernels read a weight: tiles of outputs, widths of codes, groups of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.common.errors import SchemeError
from runtime.backends.cpu.huge_pages import empty_words
from runtime.backends.prepared_weight import PreparedWeight

TILE = 64
"""Outputs that lie together; there are as many as fill the last tile."""
INPUT_MULTIPLE = 32
"""Number of inputs that divides every group, and all inputs."""
SMALL_GROUP = 16
"""Group that 4-bit codes without zero points may have beside float activations."""
SPARSE_BITS = 3
"""Per weight: two codes of 4 bits and two places of 2 bits for four of them."""
NUMBER_BITS = 16
"""Bits of a weight that is bfloat16 numbers."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of dtypes in C."""


def stored_bits(bits: int) -> int:
    """Bits that a code takes in memory."""
    return next(width for width in (2, 4, 8) if bits <= width)


def padded_features(out_features: int) -> int:
    """Output features with those that fill the last tile."""
    return out_features + -out_features % TILE


def check_inputs(in_features: int, group: int, takes_small: bool = False) -> None:
    """Raises SchemeError for inputs or groups that the C kernels do not take."""
    if in_features % INPUT_MULTIPLE or (group % INPUT_MULTIPLE and not (takes_small and group == SMALL_GROUP)):
        raise SchemeError(
            f"groups of {group} of {in_features} inputs are no multiple of {INPUT_MULTIPLE}",
            "Use --linear-backend reference",
        )


def packed_words(out_features: int, in_features: int, bits: int) -> Tensor:
    return empty_words(padded_features(out_features) * in_features * bits // 32)


def tiled(values: Tensor) -> Tensor:
    """`[O, G]` as `[O / TILE, G, TILE]`, with zeros for the features that are not there."""
    padded = torch.cat((values, values.new_zeros(-len(values) % TILE, values.shape[1])))
    return padded.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()


def check_prepared(weight: PreparedWeight, takes_small: bool = False) -> None:
    """Checks that the C kernels find memory wherever they read.

    Args:
        takes_small: whether activations are floats and codes are looked up in a table.

    Raises:
        CheckpointError: tensors that a weight of this shape, bits and groups does not have.
    """
    (rows, columns), bits, group = weight.shape, weight.bits, weight.group
    is_number = bits == NUMBER_BITS
    known = is_number or bits in (2, SPARSE_BITS, 4, 8)
    small = takes_small and group == SMALL_GROUP and bits == 4 and "zeros" not in weight.tensors
    fits = group > 0 and (small or group % INPUT_MULTIPLE == 0) and columns % group == columns % INPUT_MULTIPLE == 0
    if not known or not fits or (is_number and group != columns):
        raise weight.refusal(f"{bits} bits in groups of {group}")
    weight.check("words", (padded_features(rows) * columns * bits // 32,), (torch.int32,))
    scales = padded_features(rows) // TILE, columns // group, TILE
    if not is_number:
        weight.check("scales", scales, tuple(TYPES))
    if "zeros" in weight.tensors:
        weight.check("zeros", scales, (torch.uint8,))

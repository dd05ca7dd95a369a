"""Layout in which the C kernels read a weight: tiles of outputs, widths of codes, groups of inputs."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from compress.checkpoint.weights.coded import Coded
from compress.common.errors import SchemeError
from runtime.backends.cpu.huge_pages import empty_words
from runtime.backends.prepared_weight import PreparedWeight

TILE = 64
"""Outputs that lie together; there are as many as fill the last tile."""
INPUT_MULTIPLE = 32
"""Number of inputs that divides every group, and all inputs."""
SMALL_GROUP = 16
"""Group size that codes, except those of 2:4 sparsity, may also have with float activations."""
SPARSE_BITS = 3
"""Per weight: two codes of 4 bits and two places of 2 bits for four of them."""
NUMBER_BITS = 16
"""Bits of a weight that is bfloat16 numbers."""
BESIDE_CODES: tuple[set[str], ...] = (set(), {"zeros"}, {"steps"}, {"minima"}, {"steps", "minima", "minimum_steps"})
"""Sets of tensors next to codes and scales: the first two with 8-bit activations, the first with bfloat16 numbers."""
VALUES = "values"
"""Name of the float32 numbers of a table, one for each code that the width has."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of dtypes in C."""
SCALE_TYPES = TYPES | {torch.uint8: 3}
"""As `TYPES`, and of bytes `e` that stand for `2^(e - 127)`."""


def stored_bits(bits: float) -> int:
    """Bits that a code takes in memory."""
    return next(width for width in (2, 4, 8) if bits <= width)


def compiled_group(form: Coded, in_features: int) -> int:
    """Columns that share a scale in C: those of a form, or as many as divide them, so that rows are whole groups."""
    group = gcd(in_features, form.columns(in_features))
    return group if group % INPUT_MULTIPLE == 0 else gcd(group, SMALL_GROUP)


def padded_features(out_features: int) -> int:
    """Output features with those that fill the last tile."""
    return out_features + -out_features % TILE


def check_inputs(in_features: int, group: int, takes_small: bool = False) -> None:
    """Raises SchemeError for inputs or groups that the C kernels do not take."""
    if in_features % INPUT_MULTIPLE or (group % INPUT_MULTIPLE and not (takes_small and group == SMALL_GROUP)):
        raise SchemeError(
            f"groups of {group} of {in_features} inputs are not a multiple of {INPUT_MULTIPLE}",
            "Use --linear-backend reference",
        )


def packed_words(out_features: int, in_features: int, bits: int) -> Tensor:
    return empty_words(padded_features(out_features) * in_features * bits // 32)


def tiled(values: Tensor) -> Tensor:
    """`[O, G]` as `[O / TILE, G, TILE]`, with zeros for the features that are not there."""
    padded = torch.cat((values, values.new_zeros(-len(values) % TILE, values.shape[1])))
    return padded.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()


def shared_by_tiles(scales: Tensor) -> Tensor | None:
    """Float32 `[O / TILE, G, 1]` of scales `[O, G]` of which each tile has one; None where rows of a tile differ."""
    first = scales[::TILE].float()
    alike = torch.equal(first.repeat_interleave(TILE, 0)[: len(scales)], scales.float())
    return first.unsqueeze(-1).contiguous() if alike else None


def check_prepared(weight: PreparedWeight, is_float: bool) -> None:
    """Checks that the C kernels find memory wherever they read.

    Args:
        is_float: whether activations are floats.

    Raises:
        CheckpointError: tensors that a weight of this shape, bits and groups does not have.
    """
    (rows, columns), bits, group = weight.shape, weight.bits, weight.group
    is_number = bits == NUMBER_BITS
    known = is_number or bits in (2, SPARSE_BITS, 4, 8)
    small = is_float and group == SMALL_GROUP and bits != SPARSE_BITS
    fits = group > 0 and (small or group % INPUT_MULTIPLE == 0) and columns % group == columns % INPUT_MULTIPLE == 0
    if not known or not fits or (is_number and group != columns):
        raise weight.refusal(f"{bits} bits in groups of {group}")
    weight.check("words", (padded_features(rows) * columns * bits // 32,), (torch.int32,))
    if VALUES in weight.tensors and is_float and bits in (2, 4, 8):
        weight.check(VALUES, (1 << bits,), (torch.float32,))
        weight = replace(weight, tensors={name: each for name, each in weight.tensors.items() if name != VALUES})
    beside = weight.tensors.keys() - ({"words"} if is_number else {"words", "scales"})
    if beside not in BESIDE_CODES[: 1 if is_number else len(BESIDE_CODES) if is_float else 2]:
        raise weight.refusal(f"{', '.join(sorted(beside))} next to its codes")
    if not is_number:
        _check_scales(weight, padded_features(rows) // TILE, columns // group)


def _check_scales(weight: PreparedWeight, tiles: int, groups: int) -> None:
    blocks = groups
    if "steps" in weight.tensors and "scales" in weight.tensors:
        blocks = next((count for count in weight.tensors["scales"].shape[1:2] if count and groups % count == 0), groups)
    if "scales" in weight.tensors and weight.tensors["scales"].shape[2:] == (1,):
        weight.check("scales", (tiles, blocks, 1), (torch.float32,))
    else:
        weight.check("scales", (tiles, blocks, TILE), tuple(SCALE_TYPES))
    if "minima" in weight.tensors:
        weight.check("minima", (tiles, blocks, TILE), (weight.tensors["scales"].dtype,))
    for name, dtype in (("zeros", torch.uint8), ("steps", torch.int8), ("minimum_steps", torch.int8)):
        if name in weight.tensors:
            weight.check(name, (tiles, groups, TILE), (dtype,))

"""Weights of 2:4 sparsity of which only the kept codes and their places are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.weights import NMSparsity, Scheme
from compress.common.errors import SchemeError
from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set

ZERO_CODE = 8
"""Code of 4 bits that stands for zero."""
FASTER_SETS = ("avx2", "avx512")


def kept_unsupported_reason(scheme: Scheme) -> str:
    """Why a weight's zeros should be read, too; empty where reading kept codes alone was measured to be faster."""
    if scheme.sparsity != NMSparsity(2, 4):
        return "takes 2:4 sparsity"
    if not scheme.symmetric or scheme.bits not in (3, 4):
        return "takes symmetric codes of 3 and 4 bits"
    best = INSTRUCTION_SETS[best_instruction_set()]
    return "" if best in FASTER_SETS else f"was not seen to be faster with {best}"


def check_kept(codes: Tensor) -> None:
    """Refuses codes `[O, I]` of which more than two of four neighbours are not `ZERO_CODE`.

    Raises:
        SchemeError: there are such codes.
    """
    if (codes.unflatten(1, (-1, 4)) != ZERO_CODE).sum(-1, dtype=torch.uint8).max() > 2:
        raise SchemeError(
            "a weight recorded as 2:4 sparse keeps more than 2 of 4 values", "Use --linear-backend reference"
        )


def expand_words(words: Tensor) -> Tensor:
    """Codes `[T, I]`, int32, from words `[T, I * 3 / 32]`."""
    codes, places = words.unflatten(1, (-1, 3)).split((2, 1), -1)
    nibbles = torch.arange(0, 32, 4, dtype=torch.int32)
    kept = (codes.unsqueeze(-1) >> nibbles & 15).flatten(-2).unflatten(-1, (8, 2))
    where = (places >> torch.arange(0, 32, 2, dtype=torch.int32) & 3).unflatten(-1, (8, 2))
    filled = torch.full((*kept.shape[:-1], 4), ZERO_CODE, dtype=torch.int32)
    return filled.scatter_(-1, where.long(), kept).flatten(1)

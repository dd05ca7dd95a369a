"""Loops: greedy continuations that repeat themselves without end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure

if TYPE_CHECKING:
    from compress.evaluate.side import Side

MAX_TOKENS = 128
REPEATS, LEAST = 3, 24
"""A loop is the last tokens that are the same 3 times, and 24 of them at least."""


def loop_length(tokens: Sequence[int]) -> int:
    """Returns the period of the cycle in which a continuation ends; 0 for none. A period is a third of it at most."""
    for period in range(1, len(tokens) // REPEATS + 1):
        length = max(REPEATS * period, LEAST)
        if length <= len(tokens) and tokens[-length + period :] == tokens[-length:-period]:
            return period
    return 0


class Loops(MeasuredFigure):
    """Share of prompts whose greedy continuation falls into a cycle, of the packed model minus the dense one."""

    help = "share of greedy continuations that end in a loop, minus that of the dense model"
    word = "at most"
    usual = 0.1

    def observe(self, side: Side) -> list[int]:
        from compress.evaluate.prompts import EXCHANGES, OPENINGS, prompt_tokens

        chats = [prompt_tokens(side.tokenizer, each.question) for each in EXCHANGES]
        plain = [side.tokenizer.encode(text) for text in OPENINGS]
        return [loop_length(answer) for answer in side.generate([*chats, *plain], MAX_TOKENS)]

    def judge(self, dense: list[int], packed: list[int]) -> Finding:
        counts = {"dense": sum(map(bool, dense)), "packed": sum(map(bool, packed))}
        text = f"{counts['packed']} of {len(packed)} continuations end in a loop, {counts['dense']} of the dense model"
        details = {"prompts": len(packed), **counts, "periods": {"dense": dense, "packed": packed}}
        return Finding((counts["packed"] - counts["dense"]) / len(packed), text, details=details)


FIGURES.register("loops", order=11)(Loops())

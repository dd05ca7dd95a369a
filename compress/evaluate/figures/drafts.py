"""Drafts of a model's own head of multi-token prediction: how many of them the model accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure

if TYPE_CHECKING:
    from compress.evaluate.side import Side

TOKENS, LENGTH = 4096, 512


class Drafts(MeasuredFigure):
    """Accepted first drafts of the packed model's head, relative to those of the dense model's."""

    help = "accepted drafts of the head of multi-token prediction, relative to the dense model's"
    word = "at least"
    usual = 0.9

    def observe(self, side: Side) -> float | None:
        from compress.evaluate.kv_cache import measured_windows
        from compress.evaluate.mtp import measure_acceptance

        if side.config.spec.mtp is None:
            return None
        length = min(LENGTH, side.config.default_length)
        windows = measured_windows(side.folder, data="pydoc", tokens=TOKENS, length=length)
        return measure_acceptance(side.folder, windows)

    def judge(self, dense: float | None, packed: float | None) -> Finding:
        if dense is None or packed is None:
            return Finding.nothing("the model has no head of multi-token prediction")
        if dense == 0:
            return Finding.nothing("the dense model accepts no draft")
        text = f"{dense:.1%} of the drafts of the dense model are accepted, {packed:.1%} of the packed one's"
        return Finding(packed / dense, text, details={"dense": dense, "packed": packed})


FIGURES.register("drafts", order=14)(Drafts())

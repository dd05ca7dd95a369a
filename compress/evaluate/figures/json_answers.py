"""JSON: answers that parse where JSON is asked for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure

if TYPE_CHECKING:
    from compress.evaluate.side import Side

MAX_TOKENS = 256
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)


def is_json(answer: str, closing: str = "") -> bool:
    """Whether an answer is a JSON object or array, alone or in a fenced block, after reasoning up to `closing`."""
    text = answer.rpartition(closing)[2].strip() if closing else answer.strip()
    fenced = _FENCE.fullmatch(text)
    try:
        return isinstance(json.loads(fenced[1] if fenced else text), dict | list)
    except ValueError:
        return False


class JsonAnswers(MeasuredFigure):
    """Share of the prompts that the dense model answers with JSON which the packed model answers so too."""

    help = "share of greedy JSON answers that parse, of those of the dense model that do"
    word = "at least"
    usual = 0.8

    def observe(self, side: Side) -> list[bool]:
        from compress.evaluate.prompts import OBJECTS, prompt_tokens, reasoning_of

        tokenizer, reasoning = side.tokenizer, reasoning_of(side.tokenizer)
        answers = side.generate([prompt_tokens(tokenizer, text) for text in OBJECTS], MAX_TOKENS)
        special = reasoning is not None and reasoning.uses(tokenizer.special_ids)
        texts = [tokenizer.decode(answer, skip_special_tokens=not special) for answer in answers]
        return [is_json(text, reasoning.closing if reasoning else "") for text in texts]

    def judge(self, dense: list[bool], packed: list[bool]) -> Finding:
        valid = [after for before, after in zip(dense, packed, strict=True) if before]
        details = {"prompts": len(dense), "dense": sum(dense), "packed": sum(packed)}
        if not valid:
            return Finding.nothing(f"the dense model answers none of {len(dense)} prompts with JSON")
        text = f"{sum(valid)} of the {len(valid)} answers that parse in the dense model; {sum(packed)} in all"
        return Finding(sum(valid) / len(valid), text, details=details)


FIGURES.register("json", order=12)(JsonAnswers())

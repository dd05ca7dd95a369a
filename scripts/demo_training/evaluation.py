"""Perplexity in windows: every window starts cold and its first token is not scored."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass

import torch
from torch.nn import functional

from demo_training.texts import Tokens


@dataclass(frozen=True)
class Perplexity:
    text: str
    window: int
    tokens: int
    value: float

    def __str__(self) -> str:
        return f"{self.value:.2f} in windows of {self.window} over {self.tokens:,} tokens: {self.text}"


@torch.no_grad()
def perplexity(model: torch.nn.Module, text: str, tokens: Tokens, window: int, windows: int) -> Perplexity | None:
    """Over the first `windows` whole windows of a held-out text; None when it does not fill one."""
    count = min(windows, len(tokens) // window)
    device = next(model.parameters()).device
    total = 0.0
    for index in range(count):
        ids = torch.from_numpy(tokens[index * window : (index + 1) * window].astype("int64")).to(device)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    scored = count * (window - 1)
    return Perplexity(text, window, scored, math.exp(total / scored)) if scored else None


def help_topics() -> tuple[str, str]:
    """English text that comes with every Python and is in no training set, with the version it depends on."""
    from pydoc_data.topics import topics

    return f"pydoc_data.topics of Python {platform.python_version()}", "\n\n".join(
        topics[key] for key in sorted(topics)
    )

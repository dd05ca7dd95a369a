"""Acceptance of the drafts of a head of multi-token prediction: how often it agrees with its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.evaluate.perplexity import BATCH_LOGITS, Windows

if TYPE_CHECKING:
    from runtime.model.decoder import Decoder
    from runtime.model.mtp import MtpHead


def measure_acceptance(path: Path, windows: Windows, device: str = "auto") -> float:
    """Measures the share of places in a text at which the most likely token of the head is that of the model: of the
    first draft token of each step, what greedy decoding of this text would accept. Raises ToolkitError: a checkpoint
    that cannot be served, or has no head."""
    from runtime.model.loader import load_model
    from runtime.model.mtp import load_head

    decoder = load_model(path, device=device)
    head = load_head(path, decoder)  # type: ignore[arg-type]
    agreed = [_agreement(decoder, head, window) for window in windows.tokens]  # type: ignore[arg-type]
    return float(torch.cat(agreed).double().mean())


@torch.inference_mode()
def _agreement(decoder: Decoder, head: MtpHead, tokens: Tensor) -> Tensor:
    """Compares over one window `[T]`: bool `[T - 1]`."""
    from runtime.model.scoring import head_states, hidden_states

    tokens = tokens.to(decoder.device)
    hidden = hidden_states(decoder, tokens.unsqueeze(0))[0]
    states = head_states(head, tokens[1:], decoder.final_norm(hidden)[:-1])
    size = max(1, BATCH_LOGITS // decoder.config.spec.vocab_size)
    pairs = zip(states.split(size), hidden[1:].split(size), strict=True)
    return torch.cat([head.decoder.logits(a).argmax(-1) == decoder.logits(b).argmax(-1) for a, b in pairs])

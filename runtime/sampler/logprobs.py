"""Log-probabilities of chosen tokens and of the most likely ones, of the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runtime.types import TokenLogprobs
from runtime.upload import upload


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of one token per row of raw logits `[R, V]`, with the `num_top` most likely ones of the row, best first.

    Chosen and top values are read from the same tensor: the most likely token has exactly the top's first value.
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, upload(token_ids, logits.device).unsqueeze(-1))
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    rows = zip(chosen.squeeze(-1).tolist(), ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprobs(value, tuple(zip(top_ids, top, strict=True))) for value, top_ids, top in rows]

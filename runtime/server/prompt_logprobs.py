"""Log-probabilities of prompts in the form of vLLM's API: by token id, with the rank among the alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from runtime.core.request import TokenLogprobs
from runtime.server.response_models import json_number, token_text
from runtime.text.tokenizer import Tokenizer


def write_prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Iterable[int], found: Iterable[TokenLogprobs]
) -> Iterator[dict[str, Any] | None]:
    """Yields null for the first token, then the alternatives to each token and itself.

    Args:
        found: log-probabilities of every token but the first.
    """
    yield None
    following = iter(token_ids)
    next(following, None)
    for token_id, each in zip(following, found, strict=True):
        ranked: dict[int, tuple[float, int | None]] = {token_id: (each.logprob, None)}
        ranked |= {other: (logprob, rank) for rank, (other, logprob) in enumerate(each.top, start=1)}
        yield {
            str(other): {
                "logprob": json_number(logprob),
                "rank": rank,
                "decoded_token": token_text(tokenizer.token_bytes(other)),
            }
            for other, (logprob, rank) in ranked.items()
        }

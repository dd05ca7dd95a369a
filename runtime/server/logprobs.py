"""Log-probabilities as OpenAI's two APIs write them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any, Protocol

from runtime.types import TokenLogprobs

LOWEST_LOGPROB = -9999.0


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; half a character for some."""


def json_number(logprob: float) -> float:
    """JSON has no infinity: a token that cannot occur gets the value that OpenAI's API uses."""
    return max(logprob, LOWEST_LOGPROB) if isfinite(logprob) else LOWEST_LOGPROB


def token_text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def chat_logprobs(tokenizer: TokenBytes, pairs: Iterable[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
    """`logprobs` of a chat choice, for tokens and their log-probabilities."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": token_text(raw), "logprob": json_number(logprob), "bytes": list(raw)}

    content = [
        {**entry(token_id, found.logprob), "top_logprobs": [entry(*alternative) for alternative in found.top]}
        for token_id, found in pairs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writes `logprobs` of one completion choice, piece by piece; offsets count characters from its text's start."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self.tokenizer = tokenizer
        self.offset = 0

    def write(self, pairs: Iterable[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        tokens, logprobs, tops, offsets = [], [], [], []
        for token_id, found in pairs:
            raw = self.tokenizer.token_bytes(token_id)
            tokens.append(token_text(raw))
            logprobs.append(json_number(found.logprob))
            tops.append(self.top(token_id, found))
            offsets.append(self.offset)
            self.offset += sum(byte & 0xC0 != 0x80 for byte in raw)  # bytes that begin a character
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """Alternatives by text, best first, the chosen token among them; of tokens with equal text the best counts."""
        entries: dict[str, float] = {}
        for alternative, logprob in (*found.top, (token_id, found.logprob)):
            entries.setdefault(token_text(self.tokenizer.token_bytes(alternative)), json_number(logprob))
        return entries

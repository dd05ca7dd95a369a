"""Log-probabilities as OpenAI's two APIs write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, Protocol

from runtime.types import TokenLogprobs

LOWEST_LOGPROB = -9999.0
MAX_SKIPPED_BYTES = 8
"""How far ahead a prompt's token is looked for in its text, behind what other tokens left there."""


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
        """For new tokens of the answer."""
        written = empty_logprobs()
        for token_id, found in pairs:
            self.add(written, token_id, found)
            self.offset += count_characters(self.tokenizer.token_bytes(token_id))
        return written

    def write_prompt(self, text: str, token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """For the tokens of a prompt that stands as `text` before the answer. The first has nothing before it, so no
        log-probability.

        Args:
            found: of every token but the first.
        """
        written = empty_logprobs()
        raw_text, place = text.encode(), 0
        for token_id, scored in zip(token_ids, (None, *found), strict=True):
            self.add(written, token_id, scored)
            stop = end_of(self.tokenizer.token_bytes(token_id), raw_text, place)
            self.offset += count_characters(raw_text[place:stop])
            place = stop
        self.offset = len(text)
        return written

    def add(self, written: dict[str, Any], token_id: int, found: TokenLogprobs | None) -> None:
        written["tokens"].append(token_text(self.tokenizer.token_bytes(token_id)))
        written["token_logprobs"].append(json_number(found.logprob) if found else None)
        written["top_logprobs"].append(self.top(token_id, found) if found else None)
        written["text_offset"].append(self.offset)

    def top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """Alternatives by text, best first, the chosen token among them; of tokens with equal text the best counts."""
        entries: dict[str, float] = {}
        for alternative, logprob in (*found.top, (token_id, found.logprob)):
            entries.setdefault(token_text(self.tokenizer.token_bytes(alternative)), json_number(logprob))
        return entries


def empty_logprobs() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def end_of(token: bytes, text: bytes, place: int) -> int:
    """Where a prompt's token ends in its text, if it begins at `place`. Not all tokens can be found, and then the place
    stays: the text leaves out a beginning token and a first space, and has a sign of its own for half a character."""
    for raw in (token, token.lstrip(b" ")):
        found = text.find(raw, place, place + len(raw) + MAX_SKIPPED_BYTES)
        if found >= 0:
            return found + len(raw)
    return place


def count_characters(raw: bytes) -> int:
    return sum(byte & 0xC0 != 0x80 for byte in raw)  # bytes that begin a character

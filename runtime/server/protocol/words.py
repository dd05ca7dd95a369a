"""Texts in bodies that become token ids beside the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class WordTokenizer(Protocol):
    """A tokenizer as far as words need it."""

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]: ...

    def tokens_with(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """Token ids of texts.

    Attributes:
        bad_words: of each text that the answer must not contain.
        dry_breakers: of all tokens that end a repetition.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: frozenset[int] = frozenset()


def encode_words(tokenizer: WordTokenizer, bad_words: Iterable[str], breakers: Sequence[str]) -> EncodedWords:
    """Encodes bad words at the start of a text and behind a space, and finds the tokens with breakers in them."""
    forms = dict.fromkeys(form for word in bad_words for form in (word, f" {word.lstrip()}"))
    found = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
    ends = frozenset(token_id for text in breakers for token_id in tokenizer.tokens_with(text))
    return EncodedWords(tuple(token_ids for token_ids in found if token_ids), ends)

"""Texts in bodies, other than the prompt, that become token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """Token ids of texts.

    Attributes:
        bad_words: of each text that the answer must not contain.
        dry_breakers: of all tokens that end a repetition.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: frozenset[int] = frozenset()


def encode_words(tokenizer: Tokenizer, bad_words: Iterable[str], breakers: Sequence[str]) -> EncodedWords:
    """Encodes bad words at the start of a text and after a space, and finds the tokens with breakers in them."""
    forms = dict.fromkeys(form for word in bad_words for form in (word, f" {word.lstrip()}"))
    found = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
    ends = frozenset(token_id for text in breakers for token_id in tokenizer.tokens_with(text))
    return EncodedWords(tuple(token_ids for token_ids in found if token_ids), ends)

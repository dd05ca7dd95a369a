"""Token rules of a request other than a grammar: allowed tokens, forbidden words, a minimum length. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.core.request import Constraint, SamplingParams

NOTHING_ALLOWED = "the request allows no token here"
"""Error of an answer whose rules exclude every token."""


def with_rules(
    sampling: SamplingParams, vocab_size: int, end_token_ids: Collection[int], grammar: Constraint | None
) -> Constraint | None:
    """Adds the token rules of a request to a grammar's constraint; returns the constraint itself without rules."""
    if not sampling.has_token_rules:
        return grammar
    return RuledConstraint(sampling, vocab_size, end_token_ids, grammar)


class RuledConstraint:
    """Implements `runtime.core.request.Constraint`. Sets of tokens are integers with one bit per token id.

    Args:
        vocab_size: vocabulary size of the model.
        end_token_ids: tokens that end the sequence, forbidden before `min_tokens` unless nothing else is allowed.
        grammar: additional grammar constraint, if any.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        end_token_ids: Collection[int],
        grammar: Constraint | None = None,
    ) -> None:
        self._grammar = grammar
        self._num_bytes = (vocab_size + 7) // 8
        self._listed = bits_of(sampling.allowed_token_ids) or (1 << vocab_size) - 1
        self._ends, self._min_tokens = bits_of(end_token_ids), sampling.min_tokens
        self._bad_words = sampling.bad_words
        self._output: list[int] = []

    def mask(self) -> bytes:
        allowed = self._listed & ~bits_of(self._bad_ends())
        if self._grammar is not None:
            allowed &= int.from_bytes(self._grammar.mask(), "little")
        if len(self._output) < self._min_tokens:
            allowed = allowed & ~self._ends or allowed
        return allowed.to_bytes(self._num_bytes, "little")

    def accept(self, token_ids: list[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if not self._listed >> token_id & 1 or token_id in self._bad_ends():
                return count
            if self._grammar is not None and not self._grammar.accept([token_id]):
                return count
            self._output.append(token_id)
        return len(token_ids)

    def prepare(self, token_id: int) -> None:
        if self._grammar is not None:
            self._grammar.prepare(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self._output[len(self._output) - num_tokens :]
        if self._grammar is not None:
            self._grammar.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return self._grammar is not None and self._grammar.is_complete

    @property
    def is_stuck(self) -> bool:
        return self._grammar is not None and self._grammar.is_stuck

    @property
    def is_slow(self) -> bool:
        return self._grammar is not None and self._grammar.is_slow

    def _bad_ends(self) -> list[int]:
        """Returns the last tokens of forbidden words whose other tokens are at the end of the output."""
        output = self._output
        return [word[-1] for word in self._bad_words if output[len(output) - len(word) + 1 :] == list(word[:-1])]


def bits_of(token_ids: Iterable[int]) -> int:
    """Returns an integer with the bit of each token id set."""
    octets = bytearray()
    for token_id in token_ids:
        if token_id // 8 >= len(octets):
            octets.extend(bytes(token_id // 8 + 1 - len(octets)))
        octets[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(octets, "little")

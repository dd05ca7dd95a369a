"""Which tokens may come next in one sequence that keeps to a grammar."""

from __future__ import annotations

from collections.abc import Collection

from llguidance import LLMatcher


class TokenConstraint:
    """Implements `runtime.types.Constraint`.

    To llguidance the text ends with a token that the model does not have, the one behind its last. The tokens that end
    this sequence stand for it. So a model may have any number of end tokens, or none.

    Args:
        matcher: at the beginning of the grammar; it belongs to this object from now on.
        vocab_size: of the model.
        end_token_ids: tokens that end the sequence; allowed wherever the grammar may end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(token for token in end_token_ids if token < vocab_size)
        self._has_ended = False
        self._mask: bytes | None = None
        self._is_complete = False

    def mask(self) -> bytes:
        """`ceil(vocab_size / 8)` bytes. All bits are zero when the grammar cannot go on, as at a limit of its work."""
        if self._mask is None:
            self._mask, self._is_complete = self._compute()
        return self._mask

    def accept(self, token_ids: list[int]) -> int:
        for count, token_id in enumerate(token_ids):
            is_taken = self._accept(token_id)
            if is_taken or self._matcher.is_error():
                self._mask = None
            if not is_taken:
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        self._mask = None
        num_matched = num_tokens - self._has_ended
        self._has_ended = False
        if num_matched:
            self._matcher.rollback(num_matched)

    @property
    def is_complete(self) -> bool:
        self.mask()
        return self._is_complete

    @property
    def is_stuck(self) -> bool:
        return not self.is_complete and is_empty(self.mask())

    def _accept(self, token_id: int) -> bool:
        if self._has_ended or not 0 <= token_id < self._vocab_size:
            return False
        if self._matcher.try_consume_tokens([token_id]):
            return True
        self._has_ended = token_id in self._end_token_ids and self._matcher.is_accepting()
        return self._has_ended

    def _compute(self) -> tuple[bytes, bool]:
        """The mask, and whether the text is whole and cannot be longer."""
        size = self._vocab_size
        if self._has_ended:
            return _with_bits(bytes((size + 7) // 8), self._end_token_ids), True
        if self._matcher.is_error():
            return bytes((size + 7) // 8), False
        found = self._matcher.compute_bitmask()
        may_end = self._matcher.is_accepting()
        text = _without_bit(found[: size // 8 + 1], size)[: (size + 7) // 8]
        return (_with_bits(text, self._end_token_ids) if may_end else text), may_end and is_empty(text)


def is_empty(mask: bytes) -> bool:
    """Whether no token is allowed."""
    return mask.count(0) == len(mask)


def _with_bits(mask: bytes, token_ids: Collection[int]) -> bytes:
    changed = bytearray(mask)
    for token_id in token_ids:
        changed[token_id // 8] |= 1 << token_id % 8
    return bytes(changed)


def _without_bit(mask: bytes, token_id: int) -> bytes:
    changed = bytearray(mask)
    changed[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(changed)

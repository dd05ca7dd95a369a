"""What comes out of one sequence: sampled tokens in, deltas with settled text and exact finish reasons out."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from collections.abc import Set
from typing import Protocol

from runtime.step import SampledToken
from runtime.text.grammar import Vocabulary
from runtime.text.stop import StopMatcher
from runtime.types import Delta, FinishReason, Sequence, TokenLogprobs

GRAMMAR_TOO_COMPLEX = "the grammar is too complex to be followed from here on"
"""The one error of an answer that is the fault of who asked for it."""


class IncrementalText(Protocol):
    """Text of a growing sequence; `runtime.text.detokenizer.Detokenizer` is one."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextLayer(Vocabulary, Protocol):
    """What the engine needs of a tokenizer; `runtime.text.tokenizer.Tokenizer` is one."""

    def detokenizer(
        self, prompt_token_ids: TokenIds[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalText: ...


class Answer:
    """Grows one sequence token by token and says when it is over.

    A sequence ends with `stop` at an end token (which has no text), when a stop string is complete, or when its grammar
    allows nothing more, else with `length` when it has `max_tokens`; of two reasons in one token the first named holds.

    Args:
        sequence: gets the tokens, the finish reason and the error.
        tokenizer: without it there is no text.
        eos_token_ids: the model's own end tokens.
        request_id: what the caller knows; the sequence's own id differs when the request has several answers.
        index: which of them this is.
    """

    def __init__(
        self, sequence: Sequence, tokenizer: TextLayer | None, eos_token_ids: Set[int], request_id: str, index: int
    ) -> None:
        sampling = sequence.request.sampling
        self.sequence = sequence
        self.request_id = request_id
        self.index = index
        self._max_length = sequence.num_prompt_tokens + sampling.max_tokens
        self.end_token_ids = frozenset(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
        options = {} if sampling.skip_special_tokens else {"skip_special_tokens": False}
        self._text = tokenizer.detokenizer(sequence.request.prompt_token_ids, **options) if tokenizer else None
        self._stop = StopMatcher(sampling.stop)

    def extend(self, sampled: list[SampledToken]) -> Delta:
        """Appends tokens up to the first that ends the sequence; those behind it are dropped."""
        text = ""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for token in sampled:
            if error := token.error or self._violation(token.token_id):
                self._close(FinishReason.ERROR, error)
                break
            self.sequence.token_ids.append(token.token_id)
            token_ids.append(token.token_id)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
            text += self._accept(token.token_id)
            if self.sequence.finish_reason is not None:
                break
        return self._delta(text, token_ids, logprobs)

    def end(self, reason: FinishReason, error: str = "") -> Delta:
        """Ends the sequence for a reason that is not in its tokens, with the text that was held back."""
        text = self._flush() if self.sequence.num_output_tokens else ""
        self._close(reason, error)
        return self._delta(text, [], [])

    def _violation(self, token_id: int) -> str:
        """Advances the constraint. Says what is wrong with the token, or nothing."""
        constraint = self.sequence.constraint
        if constraint is None:
            return ""
        is_taken = constraint.accept([token_id]) == 1
        if constraint.is_stuck:
            return GRAMMAR_TOO_COMPLEX
        return "" if is_taken else f"the grammar does not allow token {token_id}"

    def _accept(self, token_id: int) -> str:
        """Text settled by a token; closes the sequence when it is the last one."""
        is_end = token_id in self.end_token_ids
        text = "" if is_end or self._text is None else self._stop.push(self._text.push(token_id))
        constraint = self.sequence.constraint
        if is_end or self._stop.matched or (constraint is not None and constraint.is_complete):
            self._close(FinishReason.STOP)
        elif len(self.sequence.token_ids) >= self._max_length:
            self._close(FinishReason.LENGTH)
        return text if self.sequence.finish_reason is None else text + self._flush()

    def _flush(self) -> str:
        """What was held back. It may complete a stop string."""
        rest = self._stop.push(self._text.flush()) if self._text else ""
        if self._stop.matched:
            self._close(FinishReason.STOP)
        return rest + self._stop.flush()

    def _close(self, reason: FinishReason, error: str = "") -> None:
        self.sequence.finish_reason = reason
        self.sequence.error = error

    def _delta(self, text: str, token_ids: list[int], logprobs: list[TokenLogprobs]) -> Delta:
        sequence = self.sequence
        return Delta(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            error=sequence.error,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            index=self.index,
        )

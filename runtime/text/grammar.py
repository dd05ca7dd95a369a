"""Grammars of one model: compiled by llguidance over the bytes of its tokens, each once, followed by many answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from threading import Lock
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from runtime.sampling_params import Grammar
from runtime.text.grammar_source import compile_grammar
from runtime.text.token_constraint import TokenConstraint

CACHE_SIZE = 128
"""Distinct grammars that stay compiled."""

SPECIAL_MARK = b"\xff"
"""Begins the spelling of special tokens, so that no text of a grammar can be said with them. Never a byte of UTF-8."""


class Vocabulary(Protocol):
    """What grammars need of a tokenizer; `runtime.text.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> Mapping[str, int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class GrammarCompiler:
    """Compiles grammars for one model, each once. Any thread may ask.

    Args:
        tokenizer: of the model.
        vocab_size: of the model; ids that the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None  # takes a second for large vocabularies, so only when it is needed
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._compiling = Lock()

    def check(self, grammar: Grammar) -> None:
        """Compiles the grammar, if it is new.

        Raises:
            RequestError: it is invalid, uses what is not supported, is too large, or allows no text.
        """
        self._matcher(grammar)

    def constraint(self, grammar: Grammar, end_token_ids: Collection[int]) -> TokenConstraint:
        """A constraint for one sequence that ends with any of these tokens. Raises RequestError as `check` does."""
        return TokenConstraint(self._matcher(grammar).deep_copy(), self._vocab_size, end_token_ids)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        if matcher := self._find(grammar):
            return matcher
        with self._compiling:  # one at a time; who asks for a grammar that is there does not wait
            if matcher := self._find(grammar):
                return matcher
            if self._tokens is None:
                table = _TokenTable(self._tokenizer, self._vocab_size)
                self._tokens = LLTokenizer(TokenizerWrapper(table), self._vocab_size + 1)
            matcher = compile_grammar(grammar, self._tokens)
            with self._lock:
                self._compiled[grammar] = matcher
                if len(self._compiled) > CACHE_SIZE:
                    self._compiled.popitem(last=False)
            return matcher

    def _find(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)


class _TokenTable:
    """The vocabulary in the form that llguidance reads: attributes by these names, and a call that tokenizes."""

    bos_token_id = None

    def __init__(self, tokenizer: Vocabulary, vocab_size: int) -> None:
        special = set(tokenizer.special_ids.values())
        known = min(vocab_size, tokenizer.vocab_size)
        spelled = [(SPECIAL_MARK if i in special else b"") + tokenizer.token_bytes(i) for i in range(known)]
        self.tokens = [*spelled, *[b""] * (vocab_size - known), SPECIAL_MARK + b"<end of the grammar>"]
        self.special_token_ids = [*(i for i in sorted(special) if i < known), vocab_size]
        self.eos_token_id = vocab_size
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

"""Constrained decoding: grammars compiled by llguidance over the bytes of a model's tokens."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from compress.common.errors import RequestError
from runtime.core.request import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class TokenConstraint:
    """Implements `runtime.core.request.Constraint`.

    llguidance ends the text with a token that the model does not have, the one after its last. The tokens that end this
    sequence take its place, so a model may have any number of end tokens, or none.

    Args:
        matcher: matcher at the start of the grammar, used by this object only.
        vocab_size: vocabulary size of the model.
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
        """Returns `ceil(vocab_size / 8)` bytes. All bits are zero if the grammar cannot continue, as at a limit."""
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
        """Returns the mask, and whether the text is complete and cannot be continued."""
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
    """Returns whether no token is allowed."""
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


STACK_BYTES = 2**28
"""Address space, not memory: unused pages cost nothing."""

T = TypeVar("T")
_lock = threading.Lock()


def call_on_deep_stack(function: Callable[[], T]) -> T:
    """Calls a function in a thread with a stack of 256 MiB; returns its result or raises its exception."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="deep stack")
    with _lock:  # the setting is global; a thread started elsewhere meanwhile gets the larger stack too
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()


NAMES = {
    GrammarKind.JSON_OBJECT: "JSON grammar",
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.LARK: "Lark grammar",
}

MAX_CHARACTERS = 2**16
"""Longest text of a grammar; shorter ones cannot be nested so deeply that compiling overflows the stack."""

JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,20})?", "lenient": False, "coerce_one_of": False}
"""Whitespace in JSON is a space, or a newline with indentation, so that a model cannot continue it forever. Unsupported
keywords are errors."""

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Forced text is not tokenized in advance: the model chooses among all tokens that fit."""

LIMITS: dict[str, Any] = {"max_grammar_size": 30_000, "max_items_in_row": 10_000, "step_max_items": 200_000}
"""Limits on the work: seconds to compile, about 50 ms per token. Objects may have 2,000 optional properties."""

EXCERPT = re.compile(r"\s*(\d+ \|.*|\^*|<non-verbose/>)\s*$")
"""Lines of an error message that quote the grammar."""

POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""Position of an error in the generated grammar, which is not the user's text."""


def compile_grammar(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    """Compiles a grammar to a matcher, and computes its first mask.

    Raises:
        RequestError: the grammar is invalid, unsupported or too large, or allows no text.
    """
    from llguidance import LLMatcher, LLParserLimits

    if len(grammar.text) > MAX_CHARACTERS:
        problem = f"the {NAMES[grammar.kind]} has {len(grammar.text)} characters"
        raise RequestError(problem, f"Shorten it to at most {MAX_CHARACTERS}")
    try:
        source = LLMatcher.grammar_from_lark(f"{_lark(grammar)}\n{NO_FORCING}")
    except (ValueError, RecursionError) as error:
        raise _refusal(grammar, str(error)) from error
    limits = LLParserLimits(verbose_errors=False, **LIMITS)
    matcher = call_on_deep_stack(lambda: LLMatcher(tokens, source, log_level=0, limits=limits))
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    first = TokenConstraint(matcher, tokens.vocab_size - 1, ())
    if is_empty(first.mask()):
        raise _refusal(grammar, "it allows no text at all")
    return matcher


def _lark(grammar: Grammar) -> str:
    """Returns the grammar in llguidance's variant of Lark. Raises ValueError if a schema is not a JSON object."""
    match grammar.kind:
        case GrammarKind.REGEX:
            from llguidance import LLMatcher

            return json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"]
        case GrammarKind.LARK:
            return grammar.text
        case GrammarKind.JSON_OBJECT:
            return _json_rule({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict):
                raise ValueError("a schema must be a JSON object")
            return _json_rule(schema)


def _json_rule(schema: dict[str, Any]) -> str:
    # Overrides options in the schema, which could turn the strictness off.
    return f"start: %json {json.dumps(schema | {'x-guidance': JSON_OPTIONS})}"


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    lines = [line.strip() for line in reason.splitlines() if not EXCERPT.match(line)]
    text = "; ".join(lines)
    short = (text if grammar.kind is GrammarKind.LARK else POSITION.sub("", text))[:300] or "it is not valid"
    return RequestError(f"the {NAMES[grammar.kind]} cannot be followed: {short}", "Change or simplify it")


CACHE_SIZE = 128
"""Compiled grammars in the cache."""

SPECIAL_MARK = b"\xff"
"""First byte of special tokens, so that they match no text of a grammar. Not a byte of UTF-8."""


class Vocabulary(Protocol):
    """The tokenizer as grammars use it; `runtime.text.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> Mapping[str, int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class GrammarCompiler:
    """Compiles and caches grammars for one model. Thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: vocabulary size of the model; ids unknown to the tokenizer are never allowed.
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None  # created on first use: it takes a second for large vocabularies
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._compiling = Lock()

    def check(self, grammar: Grammar) -> None:
        """Compiles a new grammar.

        Raises:
            RequestError: the grammar is invalid, unsupported or too large, or allows no text; llguidance is missing.
        """
        self._matcher(grammar)

    def constraint(self, grammar: Grammar, end_token_ids: Collection[int]) -> TokenConstraint:
        """Returns a constraint for one sequence that ends with any of these tokens. Raises RequestError as `check`
        does."""
        return TokenConstraint(self._matcher(grammar).deep_copy(), self._vocab_size, end_token_ids)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        if matcher := self._find(grammar):
            return matcher
        with self._compiling:  # one at a time; cached grammars do not wait
            if matcher := self._find(grammar):
                return matcher
            self._tokens = self._tokens or _read_vocabulary(self._tokenizer, self._vocab_size)
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


def _read_vocabulary(tokenizer: Vocabulary, vocab_size: int) -> LLTokenizer:
    """Raises RequestError without llguidance, which is imported here first: other requests do not need it."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise RequestError("grammars need llguidance, which is not installed", "Run: pip install llguidance") from error
    return LLTokenizer(TokenizerWrapper(_TokenTable(tokenizer, vocab_size)), vocab_size + 1)


class _TokenTable:
    """The vocabulary in the interface of llguidance: these attributes, and a call that tokenizes."""

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

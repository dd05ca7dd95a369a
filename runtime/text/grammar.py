"""Constrained decoding: grammars compiled by llguidance over the bytes of a model's tokens."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from compress.common.errors import RequestError
from runtime.core.request import Constraint, Grammar, GrammarKind
from runtime.text.json_rules import value_rule, with_whitespace
from runtime.text.token_table import TokenTable
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


@dataclass(slots=True)
class Work:
    """Processor time for advancing the grammar of a request, in all of its answers. Threads may lose a rare sum."""

    seconds: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkLimit:
    """Time limit for advancing a grammar: `seconds`, plus `per_token` per token."""

    seconds: float
    per_token: float

    def is_exceeded(self, work: Work) -> bool:
        return work.seconds > self.seconds + work.num_tokens * self.per_token


MAX_WORK = WorkLimit(seconds=0.6, per_token=0.05)
"""Limit per request for the largest grammars, all answers together; beyond it the grammar is too complex."""


def work_limit(vocab_size: int, num_characters: int) -> WorkLimit:
    """Returns the limit of a grammar. Masks take time in proportion to the vocabulary and the grammar, 20 ms for 2,000
    optional properties; those of ambiguous grammars take more with every token."""
    return WorkLimit(MAX_WORK.seconds, min(vocab_size * 1e-8 + num_characters * 2e-6, MAX_WORK.per_token))


INLINE_WORK = WorkLimit(seconds=0.1, per_token=0.001)
"""Limit of work in the engine's thread; slower grammars are advanced in separate threads."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class CompiledGrammar:
    """A compiled grammar.

    Attributes:
        tokens: vocabulary it was compiled for.
        matcher: matcher at the start of the grammar; it is copied, never advanced.
        num_characters: length of its text.
        is_slow: whether advancing it exceeded `INLINE_WORK` in any answer.
        seconds: seconds of work in all answers, which adds states to the shared lexer; infinite once the lexer is full.
    """

    tokens: LLTokenizer
    matcher: LLMatcher
    num_characters: int
    is_slow: bool = False
    seconds: float = 0.0

    @property
    def size(self) -> float:
        """Upper bound of its bytes: 120 per character, and 300 MiB per second of work up to 600 per state."""
        return 120 * self.num_characters + min(300 * 2**20 * self.seconds, 600 * MAX_STATES)


class TokenConstraint:
    """Implements `runtime.core.request.Constraint`.

    llguidance ends the text with a token id after the model's last one. It is replaced by the end tokens of the
    sequence, so a model may have any number of end tokens, or none.

    Args:
        grammar: compiled grammar.
        vocab_size: vocabulary size of the model.
        end_token_ids: tokens that end the sequence; allowed wherever the grammar may end.
        threads: threads for slow grammars; None keeps the interpreter lock.
        work: work of all answers of the request; beyond `work_limit` no token is allowed. None starts at zero.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        vocab_size: int,
        end_token_ids: Collection[int],
        threads: LLExecutor | None = None,
        work: Work | None = None,
    ) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher.deep_copy()
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(token for token in end_token_ids if token < vocab_size)
        self._threads, self.work = threads, work or Work()
        self._limit = work_limit(vocab_size, grammar.num_characters)
        self._has_ended = False
        self._mask: bytes | None = None
        self._text_mask = b""
        self._is_complete = False
        self._prepared: tuple[int, bool] | None = None

    def mask(self) -> bytes:
        """Returns `ceil(vocab_size / 8)` bytes. All bits are zero if the grammar cannot continue, for example at a
        limit."""
        if self._mask is None:
            self._mask, self._is_complete = self._compute()
        return self._mask

    def accept(self, token_ids: list[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if not self._take(token_id):
                return count
        return len(token_ids)

    def prepare(self, token_id: int) -> None:
        is_taken = self._take(token_id)
        self.mask()
        self._prepared = token_id, is_taken

    def rollback(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        self._mask = self._prepared = None
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

    @property
    def is_slow(self) -> bool:
        return self._grammar.is_slow

    @property
    def _is_exhausted(self) -> bool:
        return self._limit.is_exceeded(self.work)

    def _take(self, token_id: int) -> bool:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == token_id:
            return prepared[1]
        is_taken = self._accept(token_id)
        if is_taken or self._matcher.is_error() or self._is_exhausted:
            self._mask = None
        return is_taken

    def _accept(self, token_id: int) -> bool:
        if self._has_ended or self._is_exhausted or not 0 <= token_id < self._vocab_size:
            return False
        if self._consume(token_id):
            return True
        self._has_ended = token_id in self._end_token_ids and self._matcher.is_accepting()
        return self._has_ended

    def _consume(self, token_id: int) -> bool:
        if self._threads and self.is_slow:
            return self._consume_in_threads(self._threads, token_id)
        begin = time.thread_time()
        is_taken = self._matcher.try_consume_tokens([token_id])
        self._count(time.thread_time() - begin, 1)
        return bool(is_taken)

    def _consume_in_threads(self, threads: LLExecutor, token_id: int) -> bool:
        """Consumes a token without the interpreter lock, which llguidance releases for two matchers or more."""
        from llguidance import LLMatcher

        self.mask()
        if not self._text_mask[token_id // 8] >> token_id % 8 & 1:
            return False  # consuming it would break the matcher
        stopped = LLMatcher(self._grammar.tokens, "", log_level=0)
        begin, begin_of_all = time.perf_counter(), time.process_time()
        is_taken, _ = threads.consume_token_par([(self._matcher, token_id), (stopped, self._vocab_size)])
        # The processor time of those threads is not known: at most that of the process, and at most what went by.
        self._count(min(time.perf_counter() - begin, time.process_time() - begin_of_all), 1)
        return is_taken

    def _count(self, seconds: float, num_tokens: int) -> None:
        self.work.seconds += seconds
        self.work.num_tokens += num_tokens
        self._grammar.seconds += float("inf") if self._matcher.is_error() else seconds
        if INLINE_WORK.is_exceeded(self.work):
            self._grammar.is_slow = True

    def _compute(self) -> tuple[bytes, bool]:
        """Returns the mask, and whether the text is complete and cannot be continued."""
        size = self._vocab_size
        self._text_mask = bytes((size + 7) // 8)
        if self._has_ended:
            return _with_bits(self._text_mask, self._end_token_ids), True
        if self._matcher.is_error() or self._is_exhausted:
            return self._text_mask, False
        begin = time.thread_time()
        found = self._matcher.compute_bitmask()
        may_end = self._matcher.is_accepting()
        self._count(time.thread_time() - begin, 0)
        self._text_mask = text = _without_bit(found[: size // 8 + 1], size)[: (size + 7) // 8]
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


def start_on_deep_stack(function: Callable[[], T]) -> Future[T]:
    """Calls a function in a new thread with a stack of 256 MiB; returns its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="deep stack", daemon=True)
    with _lock:  # the setting is global; a thread started elsewhere meanwhile gets the larger stack too
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future


NAMES = {
    GrammarKind.JSON_OBJECT: "JSON grammar",
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.LARK: "Lark grammar",
    GrammarKind.CALLS: "grammar of tool calls",
}

MAX_CHARACTERS = 2**16
"""Longest text of a grammar; shorter ones cannot be nested so deeply that compiling overflows the stack."""
MAX_SCHEMA_CHARACTERS = 2**20
"""Longest JSON schema, and longest grammar of tool calls. llguidance limits how deeply JSON may be nested."""
LONG_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.CALLS)

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Forced text is not tokenized in advance: the model chooses among all tokens that fit."""

MAX_SIZE, MAX_ITEMS = 30_000, 10_000
"""Limits on a compiled grammar (seconds to compile), and on the items of a parser per byte of text. An object with
2,000 optional properties needs more than half of these."""


def item_limits(num_characters: int) -> dict[str, Any]:
    """Returns limits on the items of a parser for a grammar of this length, because a mask cannot be interrupted: short
    grammars need few items unless they are ambiguous."""
    num_items = min(max(2_000, num_characters // 2), MAX_ITEMS)
    return {"max_items_in_row": num_items, "step_max_items": 10 * num_items}


MAX_STATES = 100_000  # of a lexer, about 60 MiB; the longest string in JSON with a limit has some 30,000 characters

EXCERPT = re.compile(r"\s*(\d+ \|.*|\^*|<non-verbose/>)\s*$")
"""Lines of an error message that quote the grammar."""

POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""Position of an error in the generated grammar, which is not the user's text."""


def compile_grammar(grammar: Grammar, tokens: LLTokenizer) -> CompiledGrammar:
    """Compiles a grammar and advances it by a few tokens. Needs a deep stack.

    Raises:
        RequestError: the grammar is invalid, unsupported or too large, or allows no text.
    """
    from llguidance import LLExecutor, LLMatcher, LLParserLimits

    limit = MAX_SCHEMA_CHARACTERS if grammar.kind in LONG_KINDS else MAX_CHARACTERS
    if len(grammar.text) > limit:
        problem = f"the {NAMES[grammar.kind]} has {len(grammar.text)} characters"
        raise RequestError(problem, f"Shorten it to at most {limit}")
    try:
        source = LLMatcher.grammar_from_lark(f"{_lark(grammar)}\n{NO_FORCING}")
    except (ValueError, RecursionError) as error:
        raise _refusal(grammar, str(error)) from error
    limits = LLParserLimits(
        verbose_errors=False,
        max_lexer_states=MAX_STATES,
        max_grammar_size=MAX_SIZE,
        **item_limits(len(grammar.text)),
    )
    matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    matcher.compute_bitmask()  # copies of the matcher need not do it again
    compiled = CompiledGrammar(tokens, matcher, len(grammar.text), is_slow=True)
    trial = TokenConstraint(compiled, tokens.vocab_size - 1, (), LLExecutor(num_threads=1))
    if is_empty(trial.mask()):
        raise _refusal(grammar, "it allows no text")
    compiled.is_slow = _is_slow(trial)
    compiled.seconds = trial.work.seconds  # the error of a trial does not concern the lexer
    return compiled


TRIAL_TOKENS = 4
"""Number of tokens for detecting a grammar that is slow from the start."""


def _is_slow(trial: TokenConstraint) -> bool:
    """Returns whether advancing a grammar by the last allowed tokens exceeds `INLINE_WORK`. The last tokens of a
    vocabulary are usually long."""
    for _ in range(TRIAL_TOKENS):
        mask = trial.mask().rstrip(b"\0")
        if not mask or INLINE_WORK.is_exceeded(trial.work):
            break
        trial.accept([8 * len(mask) - 9 + mask[-1].bit_length()])
    return INLINE_WORK.is_exceeded(trial.work)


def _lark(grammar: Grammar) -> str:
    """Returns the grammar with its prefix in llguidance's Lark dialect. Raises ValueError like `_answer_lark`."""
    answer = with_whitespace(_answer_lark(grammar), compact=not grammar.any_whitespace)
    return f"{grammar.prefix}\nanswer: %lark {{\n{answer}\n}}" if grammar.prefix else answer


def _answer_lark(grammar: Grammar) -> str:
    """Returns the grammar in llguidance's Lark dialect. Raises ValueError if a schema is not a JSON object."""
    match grammar.kind:
        case GrammarKind.REGEX:
            from llguidance import LLMatcher

            return str(json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"])
        case GrammarKind.LARK | GrammarKind.CALLS:
            return grammar.text
        case GrammarKind.JSON_OBJECT:
            return f"start: {value_rule({'type': 'object'})}"
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict):
                raise ValueError("a schema must be a JSON object")
            return f"start: {value_rule(schema)}"


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    lines = [line.strip() for line in reason.splitlines() if not EXCERPT.match(line)]
    text = "; ".join(lines)
    short = (text if grammar.kind is GrammarKind.LARK else POSITION.sub("", text))[:300] or "it is not valid"
    return RequestError(f"the {NAMES[grammar.kind]} cannot be followed: {short}", "Change or simplify it")


CACHE_SIZE, CACHE_BYTES = 128, 2**28
"""Limits of the grammar cache: number and bytes."""

COMPILE_SECONDS = 10.0
"""Limit of compiling a grammar. On an idle machine the limits above are reached first."""

SHORT_GRAMMAR, NUM_LANES = 2048, 2


def lane_of(grammar: Grammar) -> int:
    """Returns the compilation queue of a grammar: short ones do not wait for long ones."""
    return int(len(grammar.text) > SHORT_GRAMMAR)


NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Number of threads that advance slow grammars."""


class GrammarCompiler:
    """Compiler and cache of grammars for one model. Thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: vocabulary size of the model; ids unknown to the tokenizer are never allowed.
        compile_seconds: time limit of compiling a grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compile_seconds = compile_seconds
        self._tokens: LLTokenizer | None = None
        self._recent: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._compiled: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._lock = Lock()
        self._slots = [BoundedSemaphore() for _ in range(NUM_LANES)]
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._executor: LLExecutor | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar, and caches it at least as long as the result is referenced.

        Raises:
            RequestError: the grammar is invalid, unsupported or too large, allows no text, or takes too long to
                compile; llguidance is missing.
        """
        if compiled := self.find(grammar, even_full=True):
            return compiled
        slot = self._slots[lane_of(grammar)]
        slot.acquire()  # one compilation at a time; cached grammars do not wait
        if compiled := self.find(grammar, even_full=True):
            slot.release()
            return compiled
        work = start_on_deep_stack(lambda: self._compile(grammar))
        work.add_done_callback(lambda _: slot.release())
        try:
            return work.result(self._compile_seconds)
        except TimeoutError:
            problem = f"the {NAMES[grammar.kind]} takes more than {self._compile_seconds:g} s to compile"
            raise RequestError(problem, "Simplify it") from None

    def read_vocabulary(self) -> LLTokenizer:
        """Returns the vocabulary. Reading a large one holds the interpreter lock for a second. Imports llguidance;
        raises RequestError if it is missing."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise RequestError("grammars need llguidance, which is missing", "Run: pip install llguidance") from error
        if self._tokens is None:
            table = TokenTable(self._tokenizer, self._vocab_size)
            self._tokens = LLTokenizer(TokenizerWrapper(table), self._vocab_size + 1)
        return self._tokens

    def find(self, grammar: Grammar, *, even_full: bool = False) -> CompiledGrammar | None:
        """Returns a cached grammar. Drops one with a full lexer, to be compiled again, unless `even_full`."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled and compiled.seconds == float("inf") and not even_full:
                del self._compiled[grammar]
                self._recent.pop(grammar, None)
                return None
            if grammar in self._recent:
                self._recent.move_to_end(grammar)
            return compiled

    def constraint(self, grammar: Grammar, end_token_ids: Collection[int], work: Work | None = None) -> TokenConstraint:
        """Returns a constraint for one sequence that ends with any of these tokens, and adds to the work of its
        request. Raises RequestError like `compile`."""
        compiled = self.compile(grammar)
        from llguidance import LLExecutor

        self._executor = self._executor or LLExecutor(NUM_THREADS)
        return TokenConstraint(compiled, self._vocab_size, end_token_ids, self._executor, work)

    def prepare(self, constraint: Constraint, token_id: int) -> Future[None]:
        """Prepares a token of a slow grammar in a thread; the constraint must not be used meanwhile."""
        return self._threads.submit(constraint.prepare, token_id)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        compiled = compile_grammar(grammar, self.read_vocabulary())
        with self._lock:
            self._compiled[grammar] = self._recent[grammar] = compiled
            while len(self._recent) > CACHE_SIZE or sum(each.size for each in self._recent.values()) > CACHE_BYTES:
                self._recent.popitem(last=False)
        return compiled

"""Requests, sampling parameters, sequences and deltas of answers. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from compress.common.cli import option
from compress.common.errors import RequestError
from runtime.core.adapter import Adapter
from runtime.core.dry import DryParams
from runtime.core.logit_bias import LogitBias
from runtime.core.token_filters import FilterParams

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_ANSWERS = 128
NUM_LIKELY = 128
"""Tokens that are sorted to sample from a truncated distribution; only where more may be sampled, all are."""


class GrammarKind(StrEnum):
    """Language of a grammar; `json_object` accepts any JSON object, `calls` is Lark that the server writes."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on an answer.

    Attributes:
        text: JSON schema, regular expression or Lark grammar.
        prefix: Lark rules of the preceding text, in which `answer` refers to the constrained text; empty for none.
        any_whitespace: whether JSON may have line breaks and indentation; it is compact otherwise.
    """

    kind: GrammarKind
    text: str = ""
    prefix: str = ""
    any_whitespace: bool = False


@dataclass(frozen=True, kw_only=True)
class TruncationParams:
    """Truncation of the distribution before sampling."""

    top_k: int = option(default=0, min=0, help="Sample from the K most likely tokens; 0 is off.")
    top_p: float = option(
        default=1.0, help="Sample from the most likely tokens whose probabilities add up to P; 1 is off."
    )
    min_p: float = option(default=0.0, help="Exclude tokens less likely than P times the most likely one; 0 is off.")


@dataclass(frozen=True, kw_only=True)
class PenaltyParams:
    """Penalties for tokens that occurred before."""

    repetition_penalty: float = option(
        default=1.0,
        help="Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 is off.",
    )
    presence_penalty: float = option(
        default=0.0, help="Is subtracted from the logit of each token in the output; 0 is off."
    )
    frequency_penalty: float = option(
        default=0.0,
        help="Is subtracted from a token's logit once per occurrence in the output; 0 is off.",
    )


@dataclass(frozen=True)
class SamplingParams(TruncationParams, PenaltyParams, DryParams, FilterParams):
    """Sampling parameters of a request.

    Attributes:
        max_tokens: maximum number of generated tokens; 0 only computes the prompt, and the answer ends with `length`.
        temperature: divides the logits; 0 is greedy.
        seed: determines the noise, together with the position; None lets the engine choose a seed.
        stop: strings that end the text and are not part of it.
        stop_token_ids: token ids that end the sequence in addition to the model's.
        include_stop: whether the text includes the stop string, or the text of the token that ends the sequence.
        min_tokens: number of tokens before which end tokens and stop strings are ignored; a grammar may end the
            sequence earlier.
        allowed_token_ids: the only tokens that may be sampled; none allow all.
        bad_words: token ids of each text that must not occur in the output.
        ignore_eos: whether to continue after the model's end tokens.
        logprobs: number of alternatives reported per token, before sampling parameters apply; None reports none.
        n: number of answers; the first is the same as with `n=1`.
        logit_bias: values added to logits by token id; pairs are converted.
        prompt_logprobs: as `logprobs`, for the tokens of the prompt; returned with the first delta.
        grammar: constraint on the answer.
        skip_special_tokens: whether to omit special tokens, such as those that start tool calls, from the text.
        dry_breakers: token ids that end a repetition for the DRY penalty.

    Raises:
        RequestError: a value is out of range, named in the message.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    logit_bias: LogitBias | tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    dry_breakers: frozenset[int] = frozenset()

    @property
    def has_penalties(self) -> bool:
        """Whether penalties apply."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def reads_history(self) -> bool:
        """Whether logits depend on the tokens of the sequence or on a bias."""
        return bool(self.logit_bias) or self.has_penalties

    @property
    def has_token_rules(self) -> bool:
        """Whether token rules other than a grammar apply."""
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_words)

    @property
    def needs_tokens(self) -> bool:
        """Whether sampling needs logits or tokens on the host first."""
        return self.has_dry or self.is_filtered

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are sampled from a truncated distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def may_need_all(self) -> bool:
        """Whether tokens beyond the `NUM_LIKELY` most likely ones may be sampled from a truncated distribution."""
        return self.is_truncated and not 0 < self.top_k < NUM_LIKELY

    def __post_init__(self) -> None:
        if self.logit_bias and not isinstance(self.logit_bias, LogitBias):
            object.__setattr__(self, "logit_bias", LogitBias.of(self.logit_bias))
        checks = (
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", 0 <= self.top_k <= MAX_TOP_K, f"0 (off) to {MAX_TOP_K}"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}"),
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(token_id >= 0 for token_id in self.stop_token_ids), "0 or more each"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens={self.max_tokens}"),
            ("bad_words", all(self.bad_words), "one token or more each"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("n", 1 <= self.n <= MAX_ANSWERS, f"between 1 and {MAX_ANSWERS}"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 2, "above 0 and at most 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "between 0 and 20"),
            *self.dry_rules(),
            *self.filter_rules(),
        )
        for name, fits, rule in checks:
            if not fits:
                raise RequestError(f"{name}={getattr(self, name)!r} is not allowed", f"{name} must be {rule}")


MAX_PRIORITY = 100


class Status(StrEnum):
    """State of a sequence in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Reason for the end of an answer: an end token or stop string, a limit on length or time, an abort, or a
    failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class Pooling(StrEnum):
    """Pooling of the prompt's final hidden states, which are returned instead of tokens."""

    NONE = ""
    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Serving options of a request, independent of sampling.

    Attributes:
        priority: lower values are served earlier; each unit shifts a request by a fixed number of places in the
            client's queue.
        time_limit: seconds, waiting included, after which the request ends with its output so far; None means no limit.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        pooling: return the mean of the prompt's hidden states, or those of its last token, instead of tokens.
        client: name of the client; the engine is shared equally between clients.
        detokenize: whether deltas have text. Without it, stop strings are not found.
        adapter: name of a LoRA adapter; "" for the model itself.

    Raises:
        RequestError: a value outside of its range, by name.
    """

    priority: int = 0
    time_limit: float | None = None
    cache_salt: str = ""
    pooling: Pooling = Pooling.NONE
    client: str = ""
    detokenize: bool = True
    adapter: str = ""

    @property
    def embed(self) -> bool:
        """Whether hidden states are returned."""
        return bool(self.pooling)

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            rule = f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}"
            raise RequestError(f"priority={self.priority} is not allowed", rule)
        if self.time_limit is not None and not self.time_limit > 0:
            raise RequestError(f"time_limit={self.time_limit} is not allowed", "time_limit must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a sampled token and of the most likely alternatives, before sampling parameters apply."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class LogprobColumns(Items[TokenLogprobs]):
    """Log-probabilities of many tokens in a few arrays: a million objects would be slow to create and to free.

    Attributes:
        num_top: number of alternatives per token, K.
        logprobs: float64 `[T]`.
        top_ids: int64 `[T * K]`, best first.
        top_logprobs: float64 `[T * K]`.
    """

    num_top: int = 0
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_ids: array[int] = field(default_factory=lambda: array("q"))
    top_logprobs: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        logprob, rank = self.logprobs[index], index % len(self) * self.num_top
        top = slice(rank, rank + self.num_top)
        return TokenLogprobs(logprob, tuple(zip(self.top_ids[top], self.top_logprobs[top], strict=True)))

    def extend(self, later: LogprobColumns) -> None:
        """Appends the log-probabilities of subsequent tokens."""
        self.num_top = self.num_top or later.num_top
        self.logprobs += later.logprobs
        self.top_ids += later.top_ids
        self.top_logprobs += later.top_logprobs


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt and parameters of one answer, immutable.

    Attributes:
        seed: always set; the engine chooses one if the caller does not.
        arrival_time: seconds of the engine's clock.
        adapter: the adapter of the options; None for the model itself.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    arrival_time: float = 0.0
    options: RequestOptions = RequestOptions()
    adapter: Adapter | None = None

    @property
    def deadline(self) -> float | None:
        """Deadline of the request in seconds of the engine's clock."""
        limit = self.options.time_limit
        return None if limit is None else self.arrival_time + limit

    @property
    def is_prompt_only(self) -> bool:
        """Whether the request ends when its prompt is computed, without sampling."""
        return self.options.embed or self.sampling.max_tokens == 0


class Constraint(Protocol):
    """State of a grammar after the output so far; `runtime.text.grammar` implements it."""

    def mask(self) -> bytes:
        """Returns one bit per token id, lowest bit of the first byte first: set if the token is allowed next."""

    def accept(self, token_ids: list[int]) -> int:
        """Advances by tokens as long as they are allowed; returns their number."""

    def prepare(self, token_id: int) -> None:
        """Precomputes the next `accept` of this token and the mask after it, without the interpreter lock."""

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last `num_tokens` tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end token is allowed."""

    @property
    def is_stuck(self) -> bool:
        """Whether the grammar is too complex to follow: it is incomplete, but allows no token."""

    @property
    def is_slow(self) -> bool:
        """Whether following the grammar would hold up a step."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state of one answer.

    Attributes:
        token_ids: prompt and output.
        order: position in the queue, lowest first; set by the scheduler.
        num_computed_tokens: tokens whose keys and values are stored; preemption sets it to 0.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        block_ids: block table, managed by the scheduler.
        num_registered_blocks: leading blocks that were added to the prefix cache or came from it.
        draft_token_ids: draft tokens after `token_ids`, for one step: set by the drafter, truncated by the scheduler,
            verified by the runner.
        draft_parents: parents of draft tokens that form a tree; empty for a chain.
        state_slot: slot of the recurrent state before the next token to compute; -1 for none.
        state_marks: token counts at which to save the recurrent state.
        saved_tokens: token count of the state that was last saved or restored; 0 for none.
        is_held: whether the last sampled token is missing from `token_ids` because `constraint` is slow; the sequence
            must not be scheduled.
        needs_logits: whether a token needed a second pass over its logits, which later tokens may need as well.
    """

    request: Request
    token_ids: list[int]
    order: tuple[int, int, int] = (0, 0, 0)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str = ""
    num_preemptions: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    draft_parents: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    state_slot: int = -1
    state_marks: tuple[int, ...] = ()
    saved_tokens: int = 0
    is_held: bool = False
    needs_logits: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def client(self) -> str:
        return self.request.options.client

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def keep_drafts(self, count: int) -> None:
        """Truncates the draft to the first `count` tokens."""
        del self.draft_token_ids[count:]
        del self.draft_parents[count:]

    @property
    def wants_whole_prompt(self) -> bool:
        """Whether every prompt token must be computed, without the prefix cache."""
        request = self.request
        return (request.options.embed or request.sampling.prompt_logprobs is not None) and self.num_output_tokens == 0


@dataclass(slots=True)  # created once per token; frozen dataclasses take three times as long
class Delta:
    """Increment of an answer from one step.

    Attributes:
        index: number of the answer in its request.
        text: new text, without incomplete characters and prefixes of stop strings.
        token_ids: new tokens, including the last one; text may lag behind.
        logprobs: one entry per new token, if requested.
        finish_reason: set on the last delta of an answer only.
        error: set if `finish_reason` is `error`.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        prompt_logprobs: on the first delta of the first answer, for every prompt token but the first, if requested.
        embedding: on the only delta of an embedding request.
        stop_string: stop string that ended the answer, if any.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    index: int = 0
    prompt_logprobs: Items[TokenLogprobs] = ()
    embedding: list[float] | None = None
    stop_string: str = ""

    def append(self, later: Delta) -> None:
        """Appends the next delta of the same answer."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason, self.error, self.embedding = later.finish_reason, later.error, later.embedding
        self.num_prompt_tokens, self.num_cached_tokens = later.num_prompt_tokens, later.num_cached_tokens
        self.num_output_tokens, self.index = later.num_output_tokens, later.index
        self.stop_string = later.stop_string

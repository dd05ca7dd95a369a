"""The nouns of the engine: requests, their sequences, and what is said of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from compress.common.errors import RequestError
from compress.common.options import option

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_ANSWERS = 128


class GrammarKind(StrEnum):
    """The language in which a grammar is written; `json_object` is any JSON object."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like. `text` is the schema (as JSON), the regular expression or the Lark grammar."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class TruncationParams:
    """Which tokens may be sampled."""

    top_k: int = option("--top-k", default=0, minimum=0, help="Sample from the K most likely tokens; 0 is off.")
    top_p: float = option(
        "--top-p", default=1.0, help="Sample from the most likely tokens whose probabilities add up to P; 1 is off."
    )
    min_p: float = option(
        "--min-p", default=0.0, help="Exclude tokens less likely than P times the most likely one; 0 is off."
    )


@dataclass(frozen=True, kw_only=True)
class PenaltyParams:
    """Penalties for tokens that have occurred."""

    repetition_penalty: float = option(
        "--repetition-penalty",
        default=1.0,
        help="Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 is off.",
    )
    presence_penalty: float = option(
        "--presence-penalty", default=0.0, help="Is subtracted from the logit of each token in the output; 0 is off."
    )
    frequency_penalty: float = option(
        "--frequency-penalty",
        default=0.0,
        help="Is subtracted from a token's logit as many times as the token is in the output; 0 is off.",
    )


@dataclass(frozen=True)
class SamplingParams(TruncationParams, PenaltyParams):
    """How tokens are drawn. `temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0` are off.

    Attributes:
        max_tokens: tokens to generate at most; 0 only computes the prompt, and the answer ends with `length`.
        seed: keys the noise together with the position; None lets the engine choose one and report it.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the sequence beside the model's own end tokens.
        ignore_eos: keep going through the model's end tokens.
        logprobs: number of alternatives reported per token, of the unmodified distribution; None reports nothing.
        n: answers to one prompt, each with noise of its own; the first is the same as with `n=1`.
        logit_bias: pairs of token id and what is added to its logit.
        prompt_logprobs: as `logprobs`, for the prompt's tokens; they come with the first delta.
        grammar: what the answer must look like.
        skip_special_tokens: leave tokens that are no text, such as those that announce tool calls, out of the text.

    Raises:
        RequestError: a value outside of its range, by name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the distribution of the next one."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn, and from the likely ones only."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", 0 <= self.top_k <= MAX_TOP_K, f"0 (off) to {MAX_TOP_K}"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}"),
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(token_id >= 0 for token_id in self.stop_token_ids), "0 or more each"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("n", 1 <= self.n <= MAX_ANSWERS, f"between 1 and {MAX_ANSWERS}"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 2, "above 0 and at most 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("logit_bias", all(-100 <= bias <= 100 for _, bias in self.logit_bias), "between -100 and 100 each"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "between 0 and 20"),
        )
        for name, fits, rule in checks:
            if not fits:
                raise RequestError(f"{name}={getattr(self, name)!r} is not allowed", f"{name} must be {rule}")


MAX_PRIORITY = 100


class Status(StrEnum):
    """Where a sequence is: in the queue, among those that are computed, or at its end."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why an answer ended: by itself or at a stop string, at a limit of length or time, at a wish, or by a failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is served, whatever its tokens.

    Attributes:
        priority: smaller is served earlier; each unit is worth a fixed number of places in the queue.
        time_limit: seconds, waiting included, after which the request ends with what it has; None waits for ever.
        cache_salt: requests share cached prefixes only with those of the same salt.
        embed: instead of tokens, give the mean of the prompt's hidden states.

    Raises:
        RequestError: a value outside of its range, by name.
    """

    priority: int = 0
    time_limit: float | None = None
    cache_salt: str = ""
    embed: bool = False

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            rule = f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}"
            raise RequestError(f"priority={self.priority} is not allowed", rule)
        if self.time_limit is not None and not self.time_limit > 0:
            raise RequestError(f"time_limit={self.time_limit} is not allowed", "time_limit must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one chosen token and of the most likely alternatives, of the unmodified distribution."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and one answer, immutable once admitted. `seed` is always set: the engine fills in what was left out.

    Attributes:
        arrival_time: seconds of the engine's clock.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    arrival_time: float = 0.0
    options: RequestOptions = RequestOptions()

    @property
    def deadline(self) -> float | None:
        """Seconds of the engine's clock at which the request ends at the latest."""
        limit = self.options.time_limit
        return None if limit is None else self.arrival_time + limit

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is sampled: the request ends when its prompt is computed."""
        return self.options.embed or self.sampling.max_tokens == 0


class Constraint(Protocol):
    """What one sequence may say next; its state is the output so far. `runtime.text.grammar` makes them."""

    def mask(self) -> bytes:
        """One bit per token id, lowest bit of the first byte first: set where the token may come next."""
        ...

    def accept(self, token_ids: list[int]) -> int:
        """Takes tokens in order while they are allowed; returns how many it took."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token may come any more."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Nothing may come although it is not complete: following the grammar would take too much work."""
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """The moving part of a request: its tokens so far and how many of them are in the KV cache.

    `num_computed_tokens` counts tokens whose keys and values are stored; the scheduler closes the gap to
    `num_tokens`. Preemption sets it back to zero. Owner of `block_ids`: the block pool, through the scheduler.
    `num_registered_blocks` of them, from the first, were offered to the prefix cache or came from it.
    `order` is the place in the queue, smallest first; the scheduler sets it. `draft_token_ids` are guesses that follow
    `token_ids` and live for one step: the drafter sets them, the scheduler may drop some, the runner verifies them.
    Where they are a tree, `draft_parents` say so (see `runtime.core.step`); without any they are a chain.
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

    @property
    def id(self) -> str:
        return self.request.id

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
        """Drops all guesses but the first `count`."""
        del self.draft_token_ids[count:]
        del self.draft_parents[count:]

    @property
    def wants_whole_prompt(self) -> bool:
        """The hidden state of every prompt token is wanted, so none of them may come from the prefix cache."""
        request = self.request
        return (request.options.embed or request.sampling.prompt_logprobs is not None) and self.num_output_tokens == 0


@dataclass(slots=True)  # one per token, and frozen ones take three times as long to make
class Delta:
    """What one step added to one answer. Deltas of a request and an index, joined, are a whole answer.

    Attributes:
        index: which of the request's `n` answers.
        text: new text, already settled: no half characters, nothing that may still become a stop string.
        token_ids: new tokens, the ending one included; text may lag behind them.
        logprobs: one entry per new token when the request asked for them.
        finish_reason: set on the last delta of an answer and only there.
        error: what went wrong when `finish_reason` is `error`.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        prompt_logprobs: on the first delta of the first answer, of every prompt token but the first, when asked for.
        embedding: on the only delta of a request that embeds.
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
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: list[float] | None = None

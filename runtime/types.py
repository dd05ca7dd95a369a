"""The nouns of the engine. No torch: scheduler and blocks are tested with a fake runner in microseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from compress.checkpoint.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_ANSWERS = 128
MAX_PRIORITY = 100


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0` are off.

    Attributes:
        max_tokens: tokens to generate at most.
        seed: keys the noise together with the position; None lets the engine choose one and report it.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the sequence beside the model's own end tokens.
        ignore_eos: keep going through the model's end tokens.
        logprobs: number of alternatives reported per token, of the unmodified distribution; None reports nothing.
        n: answers to one prompt, each with noise of its own; the first is the same as with `n=1`.

    Raises:
        RequestError: a value outside of its range, by name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}"),
            ("stop", all(self.stop), "non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("n", 1 <= self.n <= MAX_ANSWERS, f"between 1 and {MAX_ANSWERS}"),
        )
        for name, fits, rule in checks:
            if not fits:
                raise RequestError(f"{name}={getattr(self, name)!r} is not allowed", f"{name} must be {rule}")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is served, whatever its tokens.

    Attributes:
        priority: smaller is served earlier; each unit is worth a fixed number of places in the queue.
        time_limit: seconds, waiting included, after which the request ends with what it has; None waits for ever.
        cache_salt: requests share cached prefixes only with those of the same salt.

    Raises:
        RequestError: a value outside of its range, by name.
    """

    priority: int = 0
    time_limit: float | None = None
    cache_salt: str = ""

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


@dataclass(eq=False, slots=True)
class Sequence:
    """The moving part of a request: its tokens so far and how many of them are in the KV cache.

    `num_computed_tokens` counts tokens whose keys and values are stored; the scheduler closes the gap to
    `num_tokens`. Preemption sets it back to zero. Owner of `block_ids`: the block pool, through the scheduler.
    `order` is the place in the queue, smallest first; the scheduler sets it.
    """

    request: Request
    token_ids: list[int]
    order: tuple[int, int, int] = (0, 0, 0)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str = ""
    num_preemptions: int = 0

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


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens `[start, start + num_tokens)` of `sequence`. When the span reaches the end of the sequence, the
    runner also samples the next token."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` slots of a block's pages to another block, before the forward pass."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the runner sees of one step: which spans to compute, which blocks to copy first."""

    entries: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token drawn for one sequence. `error` is set instead when the row was not finite; the token id is then -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens by request id, for each entry of the plan that samples. A list, because verified drafts yield several."""

    tokens: dict[str, list[SampledToken]]


@dataclass(frozen=True, slots=True)
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


class Runner(Protocol):
    """The part below the torch line, as the engine sees it."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there are; the plan uses ids 0 to num_blocks - 1."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids of prompts lie below this."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence unless it ignores them."""
        ...

    def execute(self, plan: StepPlan) -> StepOutput:
        """Runs one forward pass over the plan's spans and samples where a span reaches its sequence's end."""
        ...

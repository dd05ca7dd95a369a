"""Conversion of sampled tokens to deltas: text, stop conditions, log-probabilities, prompt results, metrics. No
torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite, isnan

from compress.common.errors import RequestError
from runtime.core.request import (
    MAX_SEED,
    Delta,
    FinishReason,
    LogprobColumns,
    Pooling,
    Request,
    SamplingParams,
    Sequence,
    TokenLogprobs,
)
from runtime.core.step import SampledToken, ScheduledSequence, StepOutput, StepPlan
from runtime.core.token_rules import with_rules
from runtime.engine.metrics import Metrics, RequestTimes
from runtime.engine.scheduler import Scheduler
from runtime.text.grammar import MAX_ITEMS, MAX_WORK, GrammarCompiler, Work
from runtime.text.tokenizer import Detokenizer, Tokenizer

GRAMMAR_TOO_COMPLEX = (
    f"the grammar is too complex to continue from here, mostly because it is ambiguous: it would take more than "
    f"{MAX_WORK.seconds:g} s of processor time or {MAX_ITEMS} items of a parser"
)


class StopMatcher:
    """Filter that passes text until a stop string occurs, and holds back prefixes of stop strings.

    The stop string that completes first ends the text, so the result does not depend on how the text is split. At
    most `max(len(stop)) - 1` characters are held back.

    Args:
        include: whether the stop string is part of the text.
    """

    def __init__(self, stop: Iterable[str], *, include: bool = False) -> None:
        self.stop, self.include = tuple(stop), include
        self.matched = ""
        self._held = ""

    def push(self, text: str) -> str:
        """Adds text and returns the part that cannot belong to a stop string. After a match `matched` is set, and the
        result is empty."""
        if self.matched:
            return ""
        if not self.stop:
            return text
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self.stop if (start := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self.matched, self._held = text[start:end], ""
            return text[: end if self.include else start]
        settled = len(text) - self._longest_beginning(text)
        self._held = text[settled:]
        return text[:settled]

    def flush(self) -> str:
        """Returns the text held back, after the last input."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = min(len(text), max(map(len, self.stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0


def end_tokens(sampling: SamplingParams, eos_token_ids: Set[int]) -> frozenset[int]:
    """Returns the tokens that end an answer, and have no text unless `include_stop` is set."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)


class RequestState:
    """Output state of one sequence: appends tokens and detects the end.

    A sequence ends with `stop` at an end token (which has no text), when a stop string is complete, or when its grammar
    is complete; otherwise with `length` at `max_tokens`. If both apply to a token, the reason is `stop`.

    Args:
        sequence: sequence that receives tokens, finish reason and error.
        tokenizer: tokenizer; None yields no text.
        eos_token_ids: end tokens of the model.
        request_id: id of the request, which differs from sequence ids if it has several answers.
        index: number of this answer in the request.
    """

    def __init__(
        self, sequence: Sequence, tokenizer: Tokenizer | None, eos_token_ids: Set[int], request_id: str, index: int
    ) -> None:
        sampling = sequence.request.sampling
        self.sequence = sequence
        self.request_id = request_id
        self.index = index
        self._max_length = sequence.num_prompt_tokens + sampling.max_tokens
        self.end_token_ids = end_tokens(sampling, eos_token_ids)
        options = {} if sampling.skip_special_tokens else {"skip_special_tokens": False}
        self._text: Detokenizer | None = None
        if tokenizer is not None and sequence.request.options.detokenize:
            self._text = tokenizer.detokenizer(sequence.request.prompt_token_ids, **options)
        self._stop = StopMatcher(sampling.stop, include=sampling.include_stop)
        self._min_tokens, self._shows_end = sampling.min_tokens, sampling.include_stop

    def extend(self, sampled: list[SampledToken]) -> Delta:
        """Appends tokens up to the first one that ends the sequence; drops the rest."""
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
        """Ends the sequence for a reason other than its tokens, and returns the text held back."""
        text = self._flush() if self.sequence.num_output_tokens else ""
        self._close(reason, error)
        return self._delta(text, [], [])

    def _violation(self, token_id: int) -> str:
        """Advances the constraint. Returns the error of a token that violates it, or an empty string."""
        constraint = self.sequence.constraint
        if constraint is None:
            return ""
        is_taken = constraint.accept([token_id]) == 1
        if constraint.is_stuck:
            return GRAMMAR_TOO_COMPLEX
        return "" if is_taken else f"the grammar does not allow token {token_id}"

    def _accept(self, token_id: int) -> str:
        """Returns the text that a token completes; ends the sequence at its last token."""
        is_end = token_id in self.end_token_ids
        text = "" if is_end and not self._shows_end else self._read(token_id)
        constraint = self.sequence.constraint
        if is_end or self._stop.matched or (constraint is not None and constraint.is_complete):
            self._close(FinishReason.STOP)
        elif len(self.sequence.token_ids) >= self._max_length:
            self._close(FinishReason.LENGTH)
        return text if self.sequence.finish_reason is None else text + self._flush()

    def _read(self, token_id: int) -> str:
        """Returns the text that a token completes; stop strings are matched after `min_tokens` tokens."""
        text = self._text.push(token_id) if self._text else ""
        is_early = self._min_tokens and self.sequence.num_output_tokens <= self._min_tokens
        return text if is_early else self._stop.push(text)

    def _flush(self) -> str:
        """Returns the text held back, which may complete a stop string."""
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
            stop_string=self._stop.matched,
        )


@dataclass(slots=True)
class PromptResults:
    """Results of a prompt: log-probabilities of all tokens except the first, and the sum of the final hidden states, or
    the last of them."""

    pooling: Pooling = Pooling.NONE
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    pooled: list[float] = field(default_factory=list)

    def add(self, entry: ScheduledSequence, output: StepOutput) -> None:
        """Adds the results of a span. Spans come in order, and from the start again after a preemption."""
        sequence_id = entry.sequence.id
        logprobs, pooled = output.prompt_logprobs.get(sequence_id), output.pooled.get(sequence_id, [])
        self.pooling = entry.sequence.request.options.pooling
        if entry.start == 0:
            self.logprobs = LogprobColumns()
        if entry.start == 0 or self.pooling is Pooling.LAST:
            self.pooled = list(pooled)
        else:
            self.pooled = [total + new for total, new in zip(self.pooled, pooled, strict=True)]
        if logprobs is not None:
            self.logprobs.extend(logprobs)

    @property
    def error(self) -> str:
        """Error message for unusable results, or an empty string."""
        if all(map(isfinite, self.pooled)) and not any(map(isnan, self.logprobs.logprobs)):
            return ""
        return "the model's hidden states are not finite (NaN or infinity)"

    def put_into(self, delta: Delta) -> Delta:
        """Adds these results to a delta."""
        count = delta.num_prompt_tokens if self.pooling is Pooling.MEAN else 1
        embedding = [total / count for total in self.pooled]
        return replace(delta, prompt_logprobs=self.logprobs, embedding=embedding or None)


@dataclass(slots=True)
class _ParentRequest:
    """Request with its `n` answers.

    Attributes:
        answers: unfinished answers by sequence id.
        forks: answers 1 to n - 1 until the prompt is computed; then they become sequences.
        deadline: deadline in seconds of the engine's clock.
        prompt: results of the prompt; None once they are delivered.
        work: work for the grammar in all answers.
    """

    id: str
    forks: list[Request]
    deadline: float | None
    answers: dict[str, RequestState] = field(default_factory=dict)
    prompt: PromptResults | None = field(default_factory=PromptResults)
    work: Work = field(default_factory=Work)


@dataclass(frozen=True, slots=True)
class _HeldTokens:
    """Sampled tokens of an answer with a slow grammar, held until a thread has advanced the grammar."""

    answer: RequestState
    sampled: list[SampledToken]
    prompt: PromptResults | None
    work: Future[None]


class OutputProcessor:
    """State of all requests, from the prompt to the last delta of their answers. Single-threaded.

    Args:
        scheduler: scheduler of their sequences.
        tokenizer: tokenizer; None yields no text.
        eos_token_ids: end tokens of the model.
        grammars: compiler of grammars; None without a tokenizer.
        vocab_size: vocabulary size of the model.
        metrics: metrics to update.
        clock: clock in seconds, for metrics and time limits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler | None,
        vocab_size: int,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._metrics, self._clock = scheduler, metrics, clock
        self._tokenizer, self._eos_token_ids, self._grammars = tokenizer, eos_token_ids, grammars
        self._vocab_size = vocab_size
        self._requests: dict[str, _ParentRequest] = {}
        self._by_sequence: dict[str, _ParentRequest] = {}
        self._times: dict[str, RequestTimes] = {}
        self._held: list[_HeldTokens] = []

    @property
    def has_held(self) -> bool:
        """Whether any answer waits for its grammar."""
        return bool(self._held)

    def ids(self) -> list[str]:
        """Returns the ids of unfinished requests."""
        return list(self._requests)

    def id_of(self, sequence: Sequence) -> str:
        """Returns the id of a sequence's request."""
        return self._by_sequence[sequence.id].id

    def add(self, first: Request) -> None:
        """Queues a request by its first answer. Raises RequestError if the id is in use."""
        forks = [_fork_request(first, index) for index in range(1, first.sampling.n)]
        if not self._by_sequence.keys().isdisjoint(r.id for r in [first, *forks]) or self._is_reserved(first.id):
            raise RequestError(f"request id {first.id!r} is in use", "Choose another id, or none")
        parent = _ParentRequest(first.id, forks, first.deadline)
        self._requests[first.id] = parent
        self._add_answer(parent, self._scheduler.add(first), 0)

    def note_start(self, plan: StepPlan) -> None:
        """Records the start of sequences that are computed for the first time."""
        now = self._clock()
        for entry in plan.entries:
            times = self._times[entry.sequence.id]
            if times.first_scheduled is None:
                self._metrics.note_scheduled(times, entry.sequence.num_prompt_tokens, now)

    def process(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Adds the results of a computed step and returns its deltas, prompts first."""
        deltas = self._add_prompts(plan, output)
        for entry in plan.entries:
            if sampled := output.tokens.get(entry.sequence.id):
                deltas += self._extend(entry.sequence, sampled)
        return deltas

    def release(self, timeout: float) -> list[Delta]:
        """Continues the held answers whose grammars are ready; waits for the first at most `timeout` seconds.

        Returns:
            Deltas of these answers; none for answers that ended meanwhile.
        """
        ready = wait([held.work for held in self._held], timeout, FIRST_COMPLETED).done if self._held else ()
        released = [held for held in self._held if held.work in ready]
        self._held = [held for held in self._held if held.work not in ready]
        return [delta for held in released for delta in self._release(held)]

    def _release(self, held: _HeldTokens) -> list[Delta]:
        held.work.result()
        sequence = held.answer.sequence
        sequence.is_held = False
        if sequence.finish_reason is not None:
            return []
        return [self._append(held.answer, held.sampled, held.prompt)]

    def _add_prompts(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Collects prompt results, and ends requests without generation."""
        deltas: list[Delta] = []
        for entry in plan.entries:
            sequence = entry.sequence
            parent = self._by_sequence[sequence.id]
            if parent.prompt and sequence.wants_whole_prompt:
                parent.prompt.add(entry, output)
            if sequence.request.is_prompt_only and sequence.num_computed_tokens == sequence.num_tokens:
                deltas += self._end_prompt(parent, sequence.request)
        return deltas

    def _extend(self, sequence: Sequence, sampled: list[SampledToken]) -> list[Delta]:
        """Adds sampled tokens to a sequence's answer; after the first tokens, starts the other answers of the
        request."""
        parent = self._by_sequence[sequence.id]
        prompt, parent.prompt = parent.prompt, None
        error = (prompt.error if prompt else "") or (sampled[0].error if parent.forks else "")
        if error:
            return self._end_all(parent, FinishReason.ERROR, error)
        # After the first token of the first answer the prompt is computed, and all answers continue from it.
        for index, request in enumerate(parent.forks, start=1):
            self._add_answer(parent, self._scheduler.fork(sequence, request, index), index)
        parent.forks = []
        answer, constraint = parent.answers[sequence.id], sequence.constraint
        if constraint is not None and constraint.is_slow and self._grammars is not None:
            work = self._grammars.prepare(constraint, sampled[0].token_id)
            self._held.append(_HeldTokens(answer, sampled, prompt, work))
            sequence.is_held = True
            return []
        return [self._append(answer, sampled, prompt)]

    def _append(self, answer: RequestState, sampled: list[SampledToken], prompt: PromptResults | None) -> Delta:
        delta = self._publish(self._by_sequence[answer.sequence.id], answer, answer.extend(sampled))
        return prompt.put_into(delta) if prompt else delta

    def end(self, request_ids: Iterable[str], reason: FinishReason, error: str = "") -> list[Delta]:
        """Ends requests and returns the last delta of each answer. Unknown and ended ids are ignored."""
        known = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        return [delta for parent in known for delta in self._end_all(parent, reason, error)]

    def end_late(self) -> list[Delta]:
        """Ends the requests whose deadline has passed."""
        now = self._clock()
        late = [parent for parent in self._requests.values() if parent.deadline is not None and now >= parent.deadline]
        return [delta for parent in late for delta in self._end_all(parent, FinishReason.TIMEOUT)]

    def _add_answer(self, parent: _ParentRequest, sequence: Sequence, index: int) -> None:
        answer = RequestState(sequence, self._tokenizer, self._eos_token_ids, parent.id, index)
        sampling, ends, grammar = sequence.request.sampling, answer.end_token_ids, None
        if sampling.grammar is not None and self._grammars is not None:
            grammar = self._grammars.constraint(sampling.grammar, ends, parent.work)
        sequence.constraint = with_rules(sampling, self._vocab_size, ends, grammar)
        parent.answers[sequence.id] = answer
        self._by_sequence[sequence.id] = parent
        self._times[sequence.id] = RequestTimes(sequence.request.arrival_time)

    def _is_reserved(self, request_id: str) -> bool:
        """Returns whether an id belongs to a request, or to an answer that has not started."""
        parent = self._requests.get(request_id.rpartition("/")[0])
        return request_id in self._requests or (parent is not None and request_id in [r.id for r in parent.forks])

    def _end_prompt(self, parent: _ParentRequest, request: Request) -> list[Delta]:
        """Ends a request without generation."""
        prompt = parent.prompt or PromptResults()
        if prompt.error:
            return self._end_all(parent, FinishReason.ERROR, prompt.error)
        first, *others = self._end_all(parent, FinishReason.STOP if request.options.embed else FinishReason.LENGTH)
        return [prompt.put_into(first), *others]

    def _publish(self, parent: _ParentRequest, answer: RequestState, delta: Delta) -> Delta:
        """Counts a delta, and frees its sequence if it is the last."""
        now, sequence = self._clock(), answer.sequence
        if delta.token_ids:
            self._metrics.note_tokens(self._times[sequence.id], len(delta.token_ids), now)
        if delta.finish_reason is not None:
            self._metrics.note_end(self._times.pop(sequence.id), sequence, delta.finish_reason, now)
            # A request with the same prefix must not reuse keys and values that led to a failure.
            self._scheduler.finish(sequence, trusted=delta.finish_reason is not FinishReason.ERROR)
            del parent.answers[sequence.id], self._by_sequence[sequence.id]
            if not parent.answers:
                del self._requests[parent.id]
        return delta

    def _end_all(self, parent: _ParentRequest, reason: FinishReason, error: str = "") -> list[Delta]:
        """Ends all answers of a request, including those that have not started."""
        deltas = [self._publish(parent, answer, answer.end(reason, error)) for answer in list(parent.answers.values())]
        for index, _ in enumerate(parent.forks, start=1):
            deltas.append(replace(deltas[0], index=index))
        return deltas


def _fork_request(first: Request, index: int) -> Request:
    # The first answer delivers the prompt results.
    sampling = replace(first.sampling, prompt_logprobs=None)
    return replace(first, id=f"{first.id}/{index}", seed=derive_seed(first.seed, index), sampling=sampling)


def derive_seed(seed: int, index: int) -> int:
    """Derives the seed of request `index` of an engine, or of answer `index` of a request."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED

"""Requests while they are answered: prompts, answers that begin and end, their text, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from compress.checkpoint.errors import RequestError
from runtime.answer import Answer, TextLayer
from runtime.metrics import Metrics, RequestTimes
from runtime.prompt_results import PromptResults
from runtime.sampling_params import MAX_SEED
from runtime.scheduler import Scheduler
from runtime.step import SampledToken, StepOutput, StepPlan
from runtime.text.grammar import GrammarCompiler
from runtime.types import Delta, FinishReason, Request, Sequence


@dataclass(slots=True)
class _Live:
    """A request until its last answer has ended.

    Attributes:
        answers: that have not ended, by sequence id.
        forks: answers 1 to n - 1 until the prompt is computed; then they become sequences.
        deadline: in the engine clock's seconds.
        prompt: what steps found out about the prompt; None once it is handed over.
    """

    id: str
    forks: list[Request]
    deadline: float | None
    answers: dict[str, Answer] = field(default_factory=dict)
    prompt: PromptResults | None = field(default_factory=PromptResults)


class LiveRequests:
    """Requests that are being answered: from prompt to answers to their last deltas. Single-threaded.

    Args:
        scheduler: computes their sequences.
        tokenizer: turns tokens into text; None where there is none.
        eos_token_ids: tokens that end an answer.
        grammars: what answers may be held to; None without a tokenizer.
        metrics: count tokens and ends.
        clock: seconds, for metrics and time limits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: TextLayer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler | None,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._metrics, self._clock = scheduler, metrics, clock
        self._tokenizer, self._eos_token_ids, self._grammars = tokenizer, eos_token_ids, grammars
        self._live: dict[str, _Live] = {}
        self._by_sequence: dict[str, _Live] = {}
        self._times: dict[str, RequestTimes] = {}

    def ids(self) -> list[str]:
        """Of all requests that have not ended."""
        return list(self._live)

    def id_of(self, sequence: Sequence) -> str:
        """Of the request that a sequence answers."""
        return self._by_sequence[sequence.id].id

    def add(self, first: Request) -> None:
        """Queues a request, by its first answer. Raises RequestError when the id is in use."""
        forks = [_fork_request(first, index) for index in range(1, first.sampling.n)]
        if not self._by_sequence.keys().isdisjoint(r.id for r in [first, *forks]) or self._is_reserved(first.id):
            raise RequestError(f"request id {first.id!r} is in use", "Choose another id, or none")
        live = _Live(first.id, forks, first.deadline)
        self._live[first.id] = live
        self._add_answer(live, self._scheduler.add(first), 0)

    def note_start(self, plan: StepPlan) -> None:
        """Records which sequences are computed for the first time."""
        now = self._clock()
        for entry in plan.entries:
            times = self._times[entry.sequence.id]
            if times.first_scheduled is None:
                self._metrics.note_scheduled(times, entry.sequence.num_prompt_tokens, now)

    def note_prompts(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Keeps what was found out about prompts, and ends the requests that want nothing else."""
        deltas: list[Delta] = []
        for entry in plan.entries:
            sequence = entry.sequence
            live = self._by_sequence[sequence.id]
            if live.prompt and sequence.wants_whole_prompt:
                live.prompt.add(entry, output)
            if sequence.request.is_prompt_only and sequence.num_computed_tokens == sequence.num_tokens:
                deltas += self._end_prompt(live, sequence.request)
        return deltas

    def extend(self, sequence: Sequence, sampled: list[SampledToken]) -> list[Delta]:
        """Adds the tokens that a step drew to the answer of a sequence; the first ones let the other answers begin."""
        live = self._by_sequence[sequence.id]
        prompt, live.prompt = live.prompt, None
        error = (prompt.error if prompt else "") or (sampled[0].error if live.forks else "")
        if error:
            return self._end_all(live, FinishReason.ERROR, error)
        # The first token of the first answer: the prompt is computed, and now all answers go on from it.
        for index, request in enumerate(live.forks, start=1):
            self._add_answer(live, self._scheduler.fork(sequence, request, index), index)
        live.forks = []
        answer = live.answers[sequence.id]
        delta = self._publish(live, answer, answer.extend(sampled))
        return [prompt.put_into(delta) if prompt else delta]

    def end(self, request_ids: Iterable[str], reason: FinishReason, error: str = "") -> list[Delta]:
        """Ends requests, with a last delta for each answer. Unknown and ended ids are fine."""
        known = [self._live[request_id] for request_id in request_ids if request_id in self._live]
        return [delta for live in known for delta in self._end_all(live, reason, error)]

    def end_late(self) -> list[Delta]:
        """Ends the requests whose time is over."""
        now = self._clock()
        late = [live for live in self._live.values() if live.deadline is not None and now >= live.deadline]
        return [delta for live in late for delta in self._end_all(live, FinishReason.TIMEOUT)]

    def _add_answer(self, live: _Live, sequence: Sequence, index: int) -> None:
        answer = Answer(sequence, self._tokenizer, self._eos_token_ids, live.id, index)
        grammar = sequence.request.sampling.grammar
        if grammar is not None and self._grammars is not None:
            sequence.constraint = self._grammars.constraint(grammar, answer.end_token_ids)
        live.answers[sequence.id] = answer
        self._by_sequence[sequence.id] = live
        self._times[sequence.id] = RequestTimes(sequence.request.arrival_time)

    def _is_reserved(self, request_id: str) -> bool:
        """Whether it names a live request, or an answer of one that has not begun."""
        parent = self._live.get(request_id.rpartition("/")[0])
        return request_id in self._live or (parent is not None and request_id in [r.id for r in parent.forks])

    def _end_prompt(self, live: _Live, request: Request) -> list[Delta]:
        """Ends a request that generates nothing."""
        prompt = live.prompt or PromptResults()
        if prompt.error:
            return self._end_all(live, FinishReason.ERROR, prompt.error)
        first, *others = self._end_all(live, FinishReason.STOP if request.options.embed else FinishReason.LENGTH)
        return [prompt.put_into(first), *others]

    def _publish(self, live: _Live, answer: Answer, delta: Delta) -> Delta:
        """Accounts for a delta, and frees its sequence if it is the last."""
        now, sequence = self._clock(), answer.sequence
        if delta.token_ids:
            self._metrics.note_tokens(self._times[sequence.id], len(delta.token_ids), now)
        if delta.finish_reason is not None:
            self._metrics.note_end(self._times.pop(sequence.id), delta.finish_reason, now)
            # Keys and values that led to a failure must not be found by the next request with the same prefix.
            self._scheduler.finish(sequence, trusted=delta.finish_reason is not FinishReason.ERROR)
            del live.answers[sequence.id], self._by_sequence[sequence.id]
            if not live.answers:
                del self._live[live.id]
        return delta

    def _end_all(self, live: _Live, reason: FinishReason, error: str = "") -> list[Delta]:
        """Ends all answers of a request, also those that have not begun."""
        deltas = [self._publish(live, answer, answer.end(reason, error)) for answer in list(live.answers.values())]
        for index, _ in enumerate(live.forks, start=1):
            deltas.append(replace(deltas[0], index=index))
        return deltas


def _fork_request(first: Request, index: int) -> Request:
    # What is known about the prompt comes with the first answer.
    sampling = replace(first.sampling, prompt_logprobs=None)
    return replace(first, id=f"{first.id}/{index}", seed=derive_seed(first.seed, index), sampling=sampling)


def derive_seed(seed: int, index: int) -> int:
    """A seed of its own for the request, or the answer of a request, with this number."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED

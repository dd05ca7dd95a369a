"""The engine: requests in, steps, deltas out. Joins scheduler, runner and text; knows neither threads nor torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from compress.checkpoint.errors import RequestError
from runtime.answer import Answer, TextLayer
from runtime.blocks import BlockPool
from runtime.chaos import Chaos
from runtime.config import RuntimeConfig
from runtime.metrics import Metrics, RequestTimes
from runtime.prompt_results import PromptResults
from runtime.sampling_params import MAX_SEED, SamplingParams
from runtime.scheduler import Scheduler
from runtime.speculative.speculator import Speculator
from runtime.step import Runner, SampledToken, StepOutput, StepPlan
from runtime.text.grammar import GrammarCompiler
from runtime.types import Delta, FinishReason, Request, RequestOptions, Sequence

logger = logging.getLogger("runtime.engine")

UNHEALTHY_AFTER = 3
"""Failed steps in a row after which the engine says that it is not healthy."""


NO_OPTIONS = RequestOptions()


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


class Engine:
    """Continuous batching over one runner. Single-threaded: `EngineThread` gives it a thread and asyncio.

    Args:
        runner: computes the steps.
        tokenizer: turns tokens into text; without it deltas carry token ids only and stop strings are refused.
        config: budgets.
        speculator: guesses what running sequences will say next; None never guesses.
        chaos: disturbs each step, for tests.
        clock: seconds, for metrics and time limits.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: TextLayer | None,
        config: RuntimeConfig,
        *,
        speculator: Speculator | None = None,
        chaos: Chaos | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.speculator = speculator
        self.tokenizer = tokenizer
        self.config = config
        pool = BlockPool(
            runner.num_blocks,
            config.block_size,
            prefix_caching=config.prefix_caching and runner.shares_blocks,
            num_host_blocks=runner.num_host_blocks,
            chained=runner.reach.window is None,
        )
        self.scheduler = Scheduler(pool, config, runner.max_model_len, runner.reach, shares_blocks=runner.shares_blocks)
        self.grammars = GrammarCompiler(tokenizer, runner.vocab_size) if tokenizer else None
        self.metrics = Metrics()
        self.num_failed_steps = 0
        self._clock = clock
        self._chaos = chaos
        self._live: dict[str, _Live] = {}
        self._by_sequence: dict[str, _Live] = {}
        self._times: dict[str, RequestTimes] = {}
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def healthy(self) -> bool:
        """False after several failed steps in a row; one good step heals it."""
        return self.num_failed_steps < UNHEALTHY_AFTER

    def check_request(self, prompt_token_ids: TokenIds[int], sampling: SamplingParams) -> None:
        """Refuses what could never be answered. Any thread may ask; a grammar that is new takes a while to compile.

        Raises:
            RequestError: token ids outside of the vocabulary, more tokens than the context or the block pool hold, a
                grammar that cannot be followed, or stop strings or a grammar without a tokenizer.
        """
        self.scheduler.check_request(len(prompt_token_ids), sampling.max_tokens)
        size = self.runner.vocab_size
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= size:
            wrong = next(token for token in prompt_token_ids if not 0 <= token < size)
            raise RequestError(f"token id {wrong} is outside of the vocabulary", f"ids go from 0 to {size - 1}")
        for token_id, _ in sampling.logit_bias:
            if not 0 <= token_id < size:
                problem = f"logit_bias names token id {token_id}, which is outside of the vocabulary"
                raise RequestError(problem, f"ids go from 0 to {size - 1}")
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", "Use stop_token_ids")
        if sampling.grammar is not None:
            if self.grammars is None:
                raise RequestError("grammars need a tokenizer", "Leave the grammar out")
            self.grammars.check(sampling.grammar)

    def add_request(
        self,
        prompt_token_ids: TokenIds[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> str:
        """Queues a prompt and returns its id.

        Args:
            request_id: chosen by the caller; None lets the engine choose.

        Raises:
            RequestError: the request could never be answered, or the id is in use.
        """
        self.check_request(prompt_token_ids, sampling)
        self._num_requests += 1
        request_id = f"request-{self._num_requests}" if request_id is None else request_id
        now, seed = self._clock(), self._seed(sampling)
        first = Request(request_id, tuple(prompt_token_ids), sampling, seed, now, options)
        forks = [_fork_request(first, index) for index in range(1, sampling.n)]
        if not self._by_sequence.keys().isdisjoint(r.id for r in [first, *forks]) or self._is_reserved(request_id):
            raise RequestError(f"request id {request_id!r} is in use", "Choose another id, or none")
        live = _Live(request_id, forks, first.deadline)
        self._live[request_id] = live
        self._add_answer(live, self.scheduler.add(first), 0)
        return request_id

    def abort(self, request_id: str) -> None:
        """Forgets a request and frees its blocks at once. Unknown and ended ids are fine."""
        if request_id in self._live:
            self._end(self._live[request_id], FinishReason.ABORT)

    def abort_all(self) -> list[Delta]:
        """Ends every request, with a last delta for each answer."""
        return [delta for live in list(self._live.values()) for delta in self._end(live, FinishReason.ABORT)]

    def step(self) -> list[Delta]:
        """Computes one step and returns what it added, at most one delta per answer.

        A runner that raises fails the requests of this step, each with deltas that say why; the others go on.

        Raises:
            RuntimeError: there is work and nothing was planned, which is a bug.
        """
        deltas = self._end_late() + self._disturb()
        self._speculate()
        plan = self._plan()
        if not plan.entries:
            return deltas
        self._note_start(plan)
        sampling = [entry.sequence for entry in plan.entries if entry.samples]
        try:
            output = self.runner.execute(plan)
            sampled = [(sequence, output.tokens[sequence.id]) for sequence in sampling]
        except Exception as error:  # whatever a kernel may raise: the requests must hear of it, the engine goes on
            deltas += self._fail_step(plan, error)
        else:
            self.num_failed_steps = 0
            self._complete(plan, sampled)
            deltas += self._note_prompts(plan, output)
            for sequence, new in sampled:
                deltas += self._extend(sequence, new)
            if output.path:
                self.metrics.steps_by_path_total[output.path] += 1
        self.metrics.steps_total += 1
        return deltas

    def render_metrics(self) -> str:
        """All figures in Prometheus' text format. Any thread may ask."""
        self.metrics.read_scheduler(self.scheduler)
        return self.metrics.render()

    def check(self) -> None:
        """Verifies the bookkeeping. What is broken is reported and rebuilt; the engine goes on without its cache."""
        try:
            self.scheduler.check()
        except (RuntimeError, LookupError):
            logger.critical("the bookkeeping of KV blocks is broken; it starts anew, without cache", exc_info=True)
            self.scheduler.heal()
            self.metrics.broken_invariants_total += 1

    # --- guesses --------------------------------------------------------------------------------------------------

    def _speculate(self) -> None:
        """Has the next tokens guessed. A drafter that raises costs no request: guessing is switched off for good."""
        if self.speculator is None:
            return
        decodes = self.scheduler.decodes()
        try:
            self.speculator.propose(decodes)
        except Exception:  # whatever a draft model's kernel may raise: the target does not need it
            logger.exception("drafting failed; speculative decoding is off from now on")
            self.speculator = None
            for sequence in decodes:
                sequence.keep_drafts(0)

    def _complete(self, plan: StepPlan, sampled: list[tuple[Sequence, list[SampledToken]]]) -> None:
        """Records a computed step; all but the last token of each sequence are draft tokens that were accepted."""
        accepted = {sequence.id: [token.token_id for token in tokens[:-1]] for sequence, tokens in sampled}
        if self.speculator is not None:
            self.metrics.spec_decode_num_draft_tokens_total += sum(entry.num_draft_tokens for entry in plan.entries)
            num_accepted = {name: len(tokens) for name, tokens in accepted.items()}
            self.metrics.spec_decode_num_accepted_tokens_total += sum(num_accepted.values())
            self.speculator.note(plan, num_accepted)
        self.scheduler.complete(plan, accepted)

    # --- beginning and end of answers -----------------------------------------------------------------------------

    def _add_answer(self, live: _Live, sequence: Sequence, index: int) -> None:
        answer = Answer(sequence, self.tokenizer, self.runner.eos_token_ids, live.id, index)
        grammar = sequence.request.sampling.grammar
        if grammar is not None and self.grammars is not None:
            sequence.constraint = self.grammars.constraint(grammar, answer.end_token_ids)
        live.answers[sequence.id] = answer
        self._by_sequence[sequence.id] = live
        self._times[sequence.id] = RequestTimes(sequence.request.arrival_time)

    def _is_reserved(self, request_id: str) -> bool:
        """Whether it names a live request, or an answer of one that has not begun."""
        parent = self._live.get(request_id.rpartition("/")[0])
        return request_id in self._live or (parent is not None and request_id in [r.id for r in parent.forks])

    def _note_prompts(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
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

    def _end_prompt(self, live: _Live, request: Request) -> list[Delta]:
        """Ends a request that generates nothing."""
        prompt = live.prompt or PromptResults()
        if prompt.error:
            return self._end(live, FinishReason.ERROR, prompt.error)
        first, *others = self._end(live, FinishReason.STOP if request.options.embed else FinishReason.LENGTH)
        return [prompt.put_into(first), *others]

    def _extend(self, sequence: Sequence, sampled: list[SampledToken]) -> list[Delta]:
        live = self._by_sequence[sequence.id]
        prompt, live.prompt = live.prompt, None
        error = (prompt.error if prompt else "") or (sampled[0].error if live.forks else "")
        if error:
            return self._end(live, FinishReason.ERROR, error)
        # The first token of the first answer: the prompt is computed, and now all answers go on from it.
        for index, request in enumerate(live.forks, start=1):
            self._add_answer(live, self.scheduler.fork(sequence, request, index), index)
        live.forks = []
        answer = live.answers[sequence.id]
        delta = self._publish(live, answer, answer.extend(sampled))
        return [prompt.put_into(delta) if prompt else delta]

    def _publish(self, live: _Live, answer: Answer, delta: Delta) -> Delta:
        """Accounts for a delta, and frees its sequence if it is the last."""
        now, sequence = self._clock(), answer.sequence
        if delta.token_ids:
            self.metrics.note_tokens(self._times[sequence.id], len(delta.token_ids), now)
        if delta.finish_reason is not None:
            self.metrics.note_end(self._times.pop(sequence.id), delta.finish_reason, now)
            # Keys and values that led to a failure must not be found by the next request with the same prefix.
            self.scheduler.finish(sequence, trusted=delta.finish_reason is not FinishReason.ERROR)
            del live.answers[sequence.id], self._by_sequence[sequence.id]
            if not live.answers:
                del self._live[live.id]
        return delta

    def _end(self, live: _Live, reason: FinishReason, error: str = "") -> list[Delta]:
        """Ends all answers of a request, also those that have not begun."""
        deltas = [self._publish(live, answer, answer.end(reason, error)) for answer in list(live.answers.values())]
        for index, _ in enumerate(live.forks, start=1):
            deltas.append(replace(deltas[0], index=index))
        return deltas

    def _end_late(self) -> list[Delta]:
        """Ends the requests whose time is over."""
        now = self._clock()
        late = [live for live in self._live.values() if live.deadline is not None and now >= live.deadline]
        return [delta for live in late for delta in self._end(live, FinishReason.TIMEOUT)]

    def _disturb(self) -> list[Delta]:
        if self._chaos is None:
            return []
        self._chaos.disturb(self.scheduler)
        aborted = [self._live[request_id] for request_id in self._chaos.choose_aborts(list(self._live))]
        return [delta for live in aborted for delta in self._end(live, FinishReason.ABORT)]

    def _plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if self.has_work and not plan.entries:
            self.check()  # blocks that are lost would be a reason
            plan = self.scheduler.schedule()
            if not plan.entries:
                raise RuntimeError("requests are waiting and the scheduler planned nothing")
        return plan

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[Delta]:
        logger.exception("a step of %d tokens failed; its %d sequences fail", plan.num_tokens, len(plan.entries))
        self.scheduler.fail()
        self.num_failed_steps += 1
        self.metrics.step_errors_total += 1
        message = f"the step failed: {type(error).__name__}: {error}"
        failed = {live.id: live for live in (self._by_sequence[entry.sequence.id] for entry in plan.entries)}
        return [delta for live in failed.values() for delta in self._end(live, FinishReason.ERROR, message)]

    def _note_start(self, plan: StepPlan) -> None:
        now = self._clock()
        for entry in plan.entries:
            times = self._times[entry.sequence.id]
            if times.first_scheduled is None:
                self.metrics.note_scheduled(times, entry.sequence.num_prompt_tokens, now)

    def _seed(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed
        return derive_seed(self.config.seed, self._num_requests)


def _fork_request(first: Request, index: int) -> Request:
    # What is known about the prompt comes with the first answer.
    sampling = replace(first.sampling, prompt_logprobs=None)
    return replace(first, id=f"{first.id}/{index}", seed=derive_seed(first.seed, index), sampling=sampling)


def derive_seed(seed: int, index: int) -> int:
    """A seed of its own for the request, or the answer of a request, with this number."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED

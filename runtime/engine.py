"""The engine: requests in, steps, deltas out. Joins scheduler, runner and text; knows neither threads nor torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from hashlib import blake2b

from compress.checkpoint.errors import RequestError
from runtime.answer import Answer, TextLayer
from runtime.blocks import BlockPool
from runtime.config import RuntimeConfig
from runtime.metrics import Metrics, RequestTimes
from runtime.scheduler import Scheduler
from runtime.types import MAX_SEED, Delta, FinishReason, Request, Runner, SamplingParams, StepPlan

logger = logging.getLogger("runtime.engine")

UNHEALTHY_AFTER = 3
"""Failed steps in a row after which the engine says that it is not healthy."""


class Engine:
    """Continuous batching over one runner. Single-threaded: `EngineThread` gives it a thread and asyncio.

    Args:
        runner: computes the steps.
        tokenizer: turns tokens into text; without it deltas carry token ids only and stop strings are refused.
        config: budgets.
        clock: seconds, for the metrics.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: TextLayer | None,
        config: RuntimeConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.config = config
        pool = BlockPool(runner.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.scheduler = Scheduler(pool, config, runner.max_model_len)
        self.metrics = Metrics()
        self.num_failed_steps = 0
        self._clock = clock
        self._answers: dict[str, Answer] = {}
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
        """Refuses what could never be answered. Reads only constants, so any thread may ask.

        Raises:
            RequestError: token ids outside of the vocabulary, stop strings without a tokenizer, or more tokens than
                the context or the block pool hold.
        """
        self.scheduler.check_request(len(prompt_token_ids), sampling.max_tokens)
        size = self.runner.vocab_size
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= size:
            wrong = next(token for token in prompt_token_ids if not 0 <= token < size)
            raise RequestError(f"token id {wrong} is outside of the vocabulary", f"ids go from 0 to {size - 1}")
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", "use stop_token_ids")

    def add_request(
        self,
        prompt_token_ids: TokenIds[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
    ) -> str:
        """Queues a prompt and returns its id.

        Args:
            request_id: chosen by the caller; None lets the engine choose.
            cache_salt: requests share cached prefixes only with those of the same salt.

        Raises:
            RequestError: the request could never be answered, or the id is in use.
        """
        self.check_request(prompt_token_ids, sampling)
        self._num_requests += 1
        request_id = f"request-{self._num_requests}" if request_id is None else request_id
        if request_id in self._answers:
            raise RequestError(f"request id {request_id!r} is in use", "choose another id, or none")
        now = self._clock()
        request = Request(request_id, tuple(prompt_token_ids), sampling, self._seed(sampling), now, cache_salt)
        sequence = self.scheduler.add(request)
        self._answers[request_id] = Answer(sequence, self.tokenizer, self.runner.eos_token_ids)
        self._times[request_id] = RequestTimes(now)
        return request_id

    def abort(self, request_id: str) -> None:
        """Forgets a request and frees its blocks at once. Unknown and ended ids are fine."""
        answer = self._answers.get(request_id)
        if answer is not None:
            self._end(answer, FinishReason.ABORT)

    def abort_all(self) -> list[Delta]:
        """Ends every request, with a last delta for each."""
        return [self._end(answer, FinishReason.ABORT) for answer in list(self._answers.values())]

    def step(self) -> list[Delta]:
        """Computes one step and returns what it added, at most one delta per request.

        A runner that raises fails the requests of this step, each with a delta that says why; the others go on.

        Raises:
            RuntimeError: there is work and nothing was planned, which is a bug.
        """
        plan = self.scheduler.schedule()
        if not plan.entries:
            if self.has_work:
                raise RuntimeError("requests are waiting and the scheduler planned nothing")
            return []
        self._note_start(plan)
        sampling = [entry.sequence for entry in plan.entries if entry.samples]
        try:
            tokens = self.runner.execute(plan).tokens
            sampled = [(sequence, tokens[sequence.id]) for sequence in sampling]
        except Exception as error:  # whatever a kernel may raise: the requests must hear of it, the engine goes on
            deltas = self._fail_step(plan, error)
        else:
            self.num_failed_steps = 0
            self.scheduler.complete(plan)
            deltas = [self._publish(self._answers[sequence.id].extend(new)) for sequence, new in sampled]
        self.metrics.steps_total += 1
        return deltas

    def render_metrics(self) -> str:
        """All figures in Prometheus' text format. Any thread may ask."""
        self.metrics.read_scheduler(self.scheduler)
        return self.metrics.render()

    def _publish(self, delta: Delta) -> Delta:
        """Accounts for a delta, and frees its sequence if it is the last."""
        now = self._clock()
        if delta.token_ids:
            self.metrics.note_tokens(self._times[delta.request_id], len(delta.token_ids), now)
        if delta.finish_reason is not None:
            self.metrics.note_end(self._times.pop(delta.request_id), delta.finish_reason, now)
            answer = self._answers.pop(delta.request_id)
            # Keys and values that led to a failure must not be found by the next request with the same prefix.
            self.scheduler.finish(answer.sequence, trusted=delta.finish_reason is not FinishReason.ERROR)
        return delta

    def _end(self, answer: Answer, reason: FinishReason, error: str = "") -> Delta:
        return self._publish(answer.end(reason, error))

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[Delta]:
        logger.exception("a step of %d tokens failed; its %d requests fail", plan.num_tokens, len(plan.entries))
        self.num_failed_steps += 1
        self.metrics.step_errors_total += 1
        message = f"the step failed: {type(error).__name__}: {error}"
        answers = [self._answers[entry.sequence.id] for entry in plan.entries]
        return [self._end(answer, FinishReason.ERROR, message) for answer in answers]

    def _note_start(self, plan: StepPlan) -> None:
        now = self._clock()
        for entry in plan.entries:
            self.metrics.note_scheduled(self._times[entry.sequence.id], entry.sequence.num_prompt_tokens, now)

    def _seed(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed
        digest = blake2b(f"{self.config.seed}/{self._num_requests}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & MAX_SEED

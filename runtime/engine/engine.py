"""The engine: accepts requests, runs steps and returns deltas. Combines scheduler, runner and text layer. No threads,
no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import replace
from itertools import chain
from typing import Protocol

from compress.common.errors import CheckpointError, RequestError
from runtime.core.adapter import Adapter, AdapterStore
from runtime.core.config import RuntimeConfig
from runtime.core.logit_bias import LogitBias
from runtime.core.request import Delta, FinishReason, Request, RequestOptions, SamplingParams, Sequence, Status
from runtime.core.step import Runner, RunnerLostError, SampledToken, StepOutput, StepPlan
from runtime.engine.block_pool import BlockPool
from runtime.engine.metrics import Metrics
from runtime.engine.output_processor import OutputProcessor, derive_seed
from runtime.engine.overlap import FailedStep, StepInFlight, plan_ahead
from runtime.engine.scheduler import Scheduler
from runtime.engine.state_manager import StateManager
from runtime.engine.state_pool import StatePool
from runtime.engine.step_costs import step_work
from runtime.text.grammar import CompiledGrammar, GrammarCompiler
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger("runtime.engine.engine")

UNHEALTHY_AFTER = 3
"""Number of consecutive failed steps after which the engine is unhealthy."""

HELD_SECONDS = 0.005
"""Maximum wait in seconds for slow grammars if there is nothing else to compute."""

NO_OPTIONS = RequestOptions()


def check_named(name: str, token_ids: TokenIds[int], vocab_size: int) -> None:
    """Raises RequestError if a token id of a field is outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        problem = f"{name} names token id {wrong}, which is outside the vocabulary"
        raise RequestError(problem, f"ids go from 0 to {vocab_size - 1}")


class Speculator(Protocol):
    """Interface of speculative decoding for the engine; implemented by `runtime.speculative.proposer.Speculator`."""

    def propose(self, decodes: TokenIds[Sequence]) -> None:
        """Sets draft tokens of the sequences that the next step decodes."""

    def note(self, plan: StepPlan, num_accepted: Mapping[str, int]) -> None:
        """Records the number of accepted draft tokens of a step, by sequence id."""


class Engine:
    """Continuous batching over one runner. Single-threaded: `EngineThread` gives it a thread and asyncio.

    Args:
        runner: computes the steps.
        tokenizer: detokenizer; without it deltas contain token ids only and stop strings are rejected.
        config: budgets and limits.
        speculator: drafts tokens of running sequences; None disables speculative decoding.
        adapters: LoRA adapters that requests may name; None for none.
        before_step: hook at the start of each step; returns deltas to return with those of the step.
        clock: clock in seconds, for metrics and time limits.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        config: RuntimeConfig,
        *,
        speculator: Speculator | None = None,
        adapters: AdapterStore | None = None,
        before_step: Callable[[Engine], list[Delta]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.speculator = speculator
        self.adapters = adapters
        self.tokenizer = tokenizer
        self.config = config
        pool = BlockPool(
            runner.num_blocks,
            config.block_size,
            prefix_caching=config.prefix_caching and runner.shares_blocks,
            num_host_blocks=runner.num_host_blocks,
            chained=runner.attention_window.window is None,
        )
        states = None
        if runner.num_state_slots:
            slots = StatePool(runner.num_state_slots, runner.num_host_states if pool.prefix_caching else 0)
            states = StateManager(
                slots,
                config.block_size,
                config.state_interval,
                saves=pool.prefix_caching,
                end_token_ids=runner.eos_token_ids,
                costs=runner.state_costs,
            )
        self.scheduler = Scheduler(
            pool, config, runner.max_model_len, runner.attention_window, states, shares_blocks=runner.shares_blocks
        )
        self.grammars = GrammarCompiler(tokenizer, runner.vocab_size) if tokenizer else None
        self.metrics = Metrics()
        self.num_failed_steps = 0
        self._clock = clock
        self._before_step = before_step
        self._num_requests = 0
        self._ahead: StepInFlight | None = None
        self.output_processor = OutputProcessor(
            self.scheduler, tokenizer, runner.eos_token_ids, self.grammars, runner.vocab_size, self.metrics, clock
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def healthy(self) -> bool:
        """False after several consecutive failed steps, until one succeeds."""
        return self.num_failed_steps < UNHEALTHY_AFTER

    def check_request(self, prompt_token_ids: TokenIds[int], sampling: SamplingParams) -> CompiledGrammar | None:
        """Validates a request. Any thread may call it; compiling a new grammar takes a while.

        Returns:
            Compiled grammar, which `add_request` reuses as long as it is referenced.

        Raises:
            RequestError: a token id is outside the vocabulary, the request exceeds the context or the block pool, the
                grammar is not supported, or stop strings or a grammar are given without a tokenizer.
        """
        self.scheduler.check_request(len(prompt_token_ids), sampling.max_tokens)
        size = self.runner.vocab_size
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= size:
            wrong = next(token for token in prompt_token_ids if not 0 <= token < size)
            raise RequestError(f"token id {wrong} is outside the vocabulary", f"ids go from 0 to {size - 1}")
        biased = sampling.logit_bias.token_ids if isinstance(sampling.logit_bias, LogitBias) else ()
        check_named("logit_bias", biased, size)
        check_named("allowed_token_ids", sampling.allowed_token_ids, size)
        check_named("bad_words", list(chain.from_iterable(sampling.bad_words)), size)
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", "Use stop_token_ids")
        if sampling.grammar is None:
            return None
        if self.grammars is None:
            raise RequestError("grammars need a tokenizer", "Leave the grammar out")
        return self.grammars.compile(sampling.grammar)

    def open_adapter(self, name: str) -> Adapter | None:
        """Returns an adapter by name, None for "". Any thread may call it; reading files takes a while.

        Raises:
            RequestError: there is no such adapter, or its files can no longer be read.
        """
        if not name:
            return None
        if self.adapters is None:
            raise RequestError(f"adapter {name!r} is asked for, and none are served", "Start with --enable-lora")
        try:
            return self.adapters.open(name)
        except CheckpointError as error:
            raise RequestError(error.problem, error.remedy) from error

    def add_request(
        self,
        prompt_token_ids: TokenIds[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> str:
        """Queues a prompt and returns its id.

        Args:
            request_id: id chosen by the caller; None lets the engine choose one.

        Raises:
            RequestError: the request is invalid, or the id is in use.
        """
        self.check_request(prompt_token_ids, sampling)
        adapter = self.open_adapter(options.adapter)
        self._num_requests += 1
        request_id = f"request-{self._num_requests}" if request_id is None else request_id
        now, seed = self._clock(), self._seed(sampling)
        first = Request(request_id, tuple(prompt_token_ids), sampling, seed, now, options, adapter)
        self.output_processor.add(first)
        return request_id

    def abort(self, request_id: str) -> list[Delta]:
        """Ends a request and frees its blocks immediately; returns its last deltas, none for an unknown or ended id."""
        return self.output_processor.end([request_id], FinishReason.ABORT)

    def abort_all(self) -> list[Delta]:
        """Ends all requests and returns the last delta of each answer."""
        return self.output_processor.end(self.output_processor.ids(), FinishReason.ABORT)

    def step(self) -> list[Delta]:
        """Completes one step and returns its deltas, at most one per answer.

        The step is planned here, unless the last call submitted it already; if possible, the step after it is submitted
        first. If the runner raises, the requests of this step fail, with the reason in their last deltas; others
        continue.

        Raises:
            RuntimeError: requests are waiting but nothing was planned, which is a bug in the scheduler.
        """
        began = self._clock()
        deltas = self.output_processor.end_late() + (self._before_step(self) if self._before_step else [])
        deltas += self.output_processor.release(timeout=0)
        step = (self._ahead and self._ahead.without_ended()) or self._begin()
        if step is None:
            self._ahead = None
            return deltas + self.output_processor.release(HELD_SECONDS)
        self.output_processor.note_start(step.plan)
        work = step_work(step.plan.entries)  # reading the step changes its sequences
        self._ahead = self._continue(step)
        deltas += self._read(step)
        self.scheduler.costs.observe(work, self._clock() - began)
        return deltas

    def render_metrics(self, model_name: str = "", engine: str = "") -> str:
        """Renders all metrics in Prometheus' text format, labelled by the model's name. Any thread may call it."""
        self.metrics.read_scheduler(self.scheduler)
        return self.metrics.render(model_name, engine)

    def check(self) -> None:
        """Verifies the bookkeeping. If it is inconsistent, logs an error and rebuilds it with an empty prefix cache."""
        try:
            self.scheduler.check()
        except (RuntimeError, LookupError):
            logger.critical(
                "the bookkeeping of KV pages is inconsistent; rebuilding it with an empty prefix cache", exc_info=True
            )
            self.scheduler.heal()
            self.metrics.broken_invariants_total += 1

    def _begin(self) -> StepInFlight | None:
        """Plans and submits a step if none is in flight; None if there is nothing to compute."""
        self._speculate()
        plan = self._plan()
        return self._submit(plan) if plan.entries else None

    def _continue(self, step: StepInFlight) -> StepInFlight | None:
        """Plans and submits the step after one in flight; None if that must be read first."""
        if not self.config.overlap or self.speculator is not None or not step.submitted.feeds_next:
            return None
        plan, reason = plan_ahead(step, self.scheduler)
        self.metrics.steps_by_overlap_total[reason or "overlapped"] += 1
        return None if reason else self._submit(plan)

    def _submit(self, plan: StepPlan) -> StepInFlight:
        rows = tuple(range(len(plan.entries)))
        try:
            return StepInFlight(plan, rows, self.runner.submit(plan))
        except RunnerLostError:
            raise
        except Exception as error:  # a kernel may raise any exception; the requests fail when the step is read
            return StepInFlight(plan, rows, FailedStep(error))

    def _read(self, step: StepInFlight) -> list[Delta]:
        """Waits for a step and processes its output."""
        plan = step.plan
        self.metrics.steps_total += 1
        try:
            output = step.submitted.result()
            if step.is_complete:
                plan = self._without_undecided(plan, output)
            sampled = [(entry.sequence, output.tokens[entry.sequence.id]) for entry in plan.entries if entry.samples]
        except Exception as error:  # a kernel may raise any exception; the requests fail, the engine continues
            return self._fail_step(plan, error)
        self.num_failed_steps = 0
        if not step.is_complete:
            self._complete(plan, sampled)
        if output.path:
            self.metrics.steps_by_path_total[output.path] += 1
        if any(output.expert_lookups):
            self.metrics.expert_cache_queries_total, self.metrics.expert_cache_hits_total = output.expert_lookups
        return self.output_processor.process(plan, output)

    def _without_undecided(self, plan: StepPlan, output: StepOutput) -> StepPlan:
        """Returns the plan without entries whose token must be sampled again, because the next step is submitted."""
        undecided = [entry for entry in plan.entries if entry.samples and entry.sequence.id not in output.tokens]
        if not undecided:
            return plan
        for entry in undecided:
            self.scheduler.redraw(entry.sequence)
        return replace(plan, entries=tuple(entry for entry in plan.entries if entry not in undecided))

    def _speculate(self) -> None:
        """Drafts the next tokens. If the drafter raises, speculation is disabled permanently and no request fails."""
        if self.speculator is None:
            return
        decodes = self.scheduler.decodes()
        try:
            self.speculator.propose(decodes)
        except Exception:  # a draft model's kernel may raise any exception; the target model does not depend on it
            logger.exception("drafting failed; speculative decoding is off from now on")
            self.speculator = None
            for sequence in decodes:
                sequence.keep_drafts(0)

    def _complete(self, plan: StepPlan, sampled: list[tuple[Sequence, list[SampledToken]]]) -> None:
        """Records a computed step. All sampled tokens of a sequence except the last are accepted draft tokens."""
        accepted = {sequence.id: [token.token_id for token in tokens[:-1]] for sequence, tokens in sampled}
        if self.speculator is not None:
            self.metrics.spec_decode_num_draft_tokens_total += sum(entry.num_draft_tokens for entry in plan.entries)
            num_accepted = {name: len(tokens) for name, tokens in accepted.items()}
            self.metrics.spec_decode_num_accepted_tokens_total += sum(num_accepted.values())
            self.speculator.note(plan, num_accepted)
        self.scheduler.complete(plan, accepted)

    def _plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        must_wait = self.output_processor.has_held or self.scheduler.blocks.lent
        if self.has_work and not plan.entries and not must_wait:
            self.check()  # lost blocks may be the cause
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
        failed = dict.fromkeys(self.output_processor.id_of(entry.sequence) for entry in plan.entries)
        deltas = self.output_processor.end(failed, FinishReason.ERROR, message)
        for entry in self._ahead.plan.entries if self._ahead else ():
            if entry.sequence.status is Status.RUNNING:
                self.scheduler.preempt(entry.sequence)  # it may share blocks with those that failed
        return deltas

    def _seed(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed
        return derive_seed(self.config.seed, self._num_requests)

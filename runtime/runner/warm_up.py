"""Steps that a runner computes before it serves, so that what serves later finds its memory."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from compress.common.device import format_bytes
from compress.common.errors import OutOfMemoryError
from runtime.backends.registry import compilers
from runtime.core.config import RuntimeConfig
from runtime.core.progress import Report, Stage, ignore
from runtime.core.request import NUM_LIKELY, Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, StepPlan

if TYPE_CHECKING:
    from runtime.runner.runner import ModelRunner

logger = logging.getLogger("runtime.runner.warm_up")

COSTLIEST = SamplingParams(temperature=1, top_k=NUM_LIKELY + 1)
"""Has the whole vocabulary of every row sorted."""

LEAST_CONTEXT = 256
"""Keys from which on attention may be cut into stretches."""
MOST_ROWS = 64
"""Tokens of a sequence that share a program of attention at most."""

Span = tuple[int, int]
"""First token and number of tokens."""


Work = Callable[[], object]


def warm_up(runner: ModelRunner, config: RuntimeConfig, report: Report = ignore) -> list[Work]:
    """Runs the largest steps of a runner whose pool is not in use yet; with `config.warm_up` also compiles and captures
    whatever a later step needs.

    Args:
        report: is told how far it is.

    Returns:
        With `config.captures_later` the captures that are left for idle time: all but those of one row and of the most
        rows. They write to no block of the pool.

    Raises:
        OutOfMemoryError: the GPU has no memory for them.
    """
    largest = largest_steps(config, runner.num_blocks, runner.max_model_len)
    work: list[Work] = [partial(runner.execute, with_states(plan, runner.num_state_slots)) for plan in largest]
    later: list[Work] = []
    try:
        if config.warm_up:
            steps, graphs = covering_launches(runner, config), _launches(runner)
            prompts: Work = partial(runner.launch, with_states(largest[0], runner.num_state_slots))
            compile_ahead(runner.decoder.device, [prompts, *graphs[:1]], [*steps, *graphs], report)
            captures, later = _split_captures(runner, config.captures_later)
            work += [*steps, *captures]
        for done, run in enumerate(work):
            report(Stage.STEPS, done, len(work))
            run()
    except torch.OutOfMemoryError as error:
        taken = format_bytes(runner.memory.pool_bytes)
        raise OutOfMemoryError(
            f"the largest step does not fit in the GPU next to {taken} of keys, values and states",
            "Allow less --kv-memory or fewer --max-num-seqs",
        ) from error
    if runner.decoder.device.type == "cuda":
        torch.cuda.synchronize(runner.decoder.device)
        peak = torch.cuda.max_memory_allocated(runner.decoder.device)
        logger.info("the largest steps are computed; with them %s of the GPU were in use", format_bytes(peak))
    return later


def compile_ahead(device: torch.device, probes: abc.Sequence[Work], others: abc.Sequence[Work], report: Report) -> None:
    """Compiles what some launches need, several kernels at a time.

    If a cache on disk has all that the probes need, it is left at that: it will have the rest, which is read when it is
    launched.
    """
    for compiler in compilers(device):
        for launches in (probes, others):
            builds = compiler.missing(partial(_call_all, launches), device)
            if not (builds and compiler.compile(builds, device, partial(report, Stage.COMPILATION))):
                break


def _call_all(work: abc.Sequence[Work]) -> None:
    for each in work:
        each()


def covering_launches(runner: ModelRunner, config: RuntimeConfig) -> list[Work]:
    """Steps, the largest first, that launch between them every kernel of a later step that is not captured."""
    plans = covering_steps(config, runner.num_blocks, runner.max_model_len)
    rows = powers_of_two(config.max_num_seqs * (1 + config.num_speculative_tokens))
    return [
        *(partial(runner.launch, with_states(plan, runner.num_state_slots)) for plan in plans),
        *(partial(runner.launch_head, number) for number in rows),
    ]


def _launches(runner: ModelRunner) -> list[Work]:
    """Launches of each kind of captured step, without capturing it."""
    graphs = runner.graphs
    return [] if graphs is None else [partial(runner.prepare, graphs, kind, capture=False) for kind in graphs.kinds]


def _split_captures(runner: ModelRunner, may_wait: bool) -> tuple[list[Work], list[Work]]:
    """Captures of each kind of step: those before the first request, and others that may be made later."""
    if (graphs := runner.graphs) is None:
        return [], []
    first, later = list[Work](), list[Work]()
    for kind in graphs.kinds:
        # The memory of the largest serves the others.
        is_needed = not may_wait or kind.num_rows in (1, graphs.kinds[0].num_rows)
        (first if is_needed else later).append(partial(runner.prepare, graphs, kind, capture=True))
    return first, later


def covering_steps(config: RuntimeConfig, num_blocks: int, max_model_len: int) -> list[StepPlan]:
    """Steps that differ in what kernels are chosen by, the largest first: tokens of the step, tokens of a sequence, and
    keys before them. Their sequences share blocks.

    Kernels are chosen by powers of two, and by whether a number is a multiple of 16.
    """
    longest = min(max_model_len, num_blocks * config.block_size)
    each = min(config.max_span_tokens, longest)
    budget = min(config.step_tokens, config.max_num_seqs * each)
    steps = []
    for count in sorted({*powers_of_two(budget), budget}, reverse=True):
        steps += _in_steps(covering_spans(min(count, each), longest), count, each, config.max_num_seqs)
        steps += [_prompts(count - 1, each)] if count > 1 else []
    return [_step(config.block_size, num_blocks, spans, shared=True) for spans in steps]


def covering_spans(most: int, longest: int) -> list[Span]:
    """Spans of sequences of up to `longest` tokens: single tokens after all numbers of keys, and all numbers of tokens
    after few and many."""
    starts = [start for start in powers_of_two(longest - 1) if start >= LEAST_CONTEXT]
    lengths = powers_of_two(min(most, MOST_ROWS))
    spans = [(start, 1) for start in starts] + [(start, n) for n in lengths for start in (0, longest - n)]
    return list(dict.fromkeys(spans))


def _in_steps(spans: abc.Sequence[Span], count: int, each: int, most: int) -> list[list[Span]]:
    """Distributes spans to steps of `count` tokens and at most `most` sequences, filled up by prompts."""
    steps: list[list[Span]] = [[]]
    for span in spans:
        if _num_tokens(steps[-1]) + span[1] > count or len(steps[-1]) + -(-count // each) >= most > 1:
            steps.append([])
        steps[-1].append(span)
    return [_prompts(count - _num_tokens(step), each) + step for step in steps]


def _prompts(count: int, each: int) -> list[Span]:
    return [(0, min(each, count - first)) for first in range(0, count, each)]


def powers_of_two(most: int) -> list[int]:
    """Those up to a number."""
    return [2**power for power in range(most.bit_length())]


def _num_tokens(spans: abc.Sequence[Span]) -> int:
    return sum(length for _, length in spans)


def largest_steps(config: RuntimeConfig, num_blocks: int, max_model_len: int) -> list[StepPlan]:
    """The most prompt tokens in one step, then the most sequences with one token each, as far as a pool holds them."""
    budget = min(config.step_tokens, num_blocks * config.block_size)
    each = min(config.max_span_tokens, max_model_len)
    spans = [min(each, budget - start) for start in range(0, budget, each)][: config.max_num_seqs]
    singles = [1] * min(config.max_num_seqs, num_blocks)
    return [_step(config.block_size, num_blocks, [(0, length) for length in lengths]) for lengths in (spans, singles)]


def _step(block_size: int, num_blocks: int, spans: abc.Sequence[Span], *, shared: bool = False) -> StepPlan:
    """Spans of prompts without those that the pool has no blocks for; with `shared`, all in the same blocks."""
    entries, free = [], iter(range(num_blocks))
    for index, (start, length) in enumerate(spans):
        stop, free = start + length, iter(range(num_blocks)) if shared else free
        blocks = [block for _, block in zip(range(0, stop, block_size), free, strict=False)]
        if len(blocks) * block_size < stop:
            break
        sequence = Sequence(Request(f"warm-up {index}", (0,) * stop, COSTLIEST, 0), [0] * stop, block_ids=blocks)
        entries.append(ScheduledSequence(sequence, start, length))
    return StepPlan(tuple(entries))


def with_states(plan: StepPlan, num_slots: int) -> StepPlan:
    """A plan of sequences that begin, with a slot for the state of each, and without those that there is none for."""
    if not num_slots:
        return plan
    entries = plan.entries[:num_slots]
    for slot, entry in enumerate(entries):
        entry.state_writes = ((entry.num_tokens - 1, slot),)
    return replace(plan, entries=entries)

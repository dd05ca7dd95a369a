"""The largest steps, computed once before anybody waits: what they need is compiled and allocated then, or refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from compress.checkpoint.errors import ToolkitError
from runtime.config import RuntimeConfig
from runtime.free_memory import format_bytes
from runtime.sampler.truncation import NUM_LIKELY
from runtime.sampling_params import SamplingParams
from runtime.step import ScheduledSequence, StepPlan
from runtime.types import Request, Sequence

if TYPE_CHECKING:
    from runtime.runner import ModelRunner

logger = logging.getLogger("runtime.runner")

COSTLIEST = SamplingParams(temperature=1, top_k=NUM_LIKELY + 1)
"""Has the whole vocabulary of every row sorted."""


def warm_up(runner: ModelRunner, config: RuntimeConfig) -> None:
    """Runs the largest steps of a runner whose pool nobody uses yet.

    Raises:
        ToolkitError: the GPU has no memory for them.
    """
    try:
        for plan in largest_steps(config, runner.num_blocks, runner.max_model_len):
            runner.execute(plan)
    except torch.OutOfMemoryError as error:
        taken = format_bytes(runner.memory.kv_bytes)
        raise ToolkitError(
            f"the largest step does not fit in the GPU beside {taken} of keys and values",
            "Allow less --kv-memory or fewer --max-sequences",
        ) from error
    if runner.decoder.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(runner.decoder.device)
        logger.info("the largest steps are computed; with them %s of the GPU were in use", format_bytes(peak))


def largest_steps(config: RuntimeConfig, num_blocks: int, max_model_len: int) -> list[StepPlan]:
    """The most prompt tokens in one step, then the most sequences with one token each, as far as a pool holds them."""
    budget = min(config.max_num_batched_tokens, num_blocks * config.block_size)
    each = min(config.max_span_tokens, max_model_len)
    spans = [min(each, budget - start) for start in range(0, budget, each)][: config.max_num_sequences]
    singles = [1] * min(config.max_num_sequences, num_blocks)
    return [_step(config.block_size, num_blocks, spans), _step(config.block_size, num_blocks, singles)]


def _step(block_size: int, num_blocks: int, lengths: list[int]) -> StepPlan:
    """Prompts of these lengths, without those that the pool has no blocks for."""
    entries, free = [], iter(range(num_blocks))
    for index, length in enumerate(lengths):
        blocks = [block for _, block in zip(range(0, length, block_size), free, strict=False)]
        if len(blocks) * block_size < length:
            break
        sequence = Sequence(Request(f"warm-up {index}", (0,) * length, COSTLIEST, 0), [0] * length, block_ids=blocks)
        entries.append(ScheduledSequence(sequence, 0, length))
    return StepPlan(tuple(entries))

"""The part below the torch line: one object with one method. Holds the model and the pages of keys and values."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.checkpoint.errors import ToolkitError
from runtime.attention.gpu import TritonAttention
from runtime.attention.gpu import refuse as refuse_triton
from runtime.attention.native import NativeAttention
from runtime.attention.native_layers import NativeLayers, refuse_layers
from runtime.attention.paged import PagedAttention
from runtime.attention.step_keys import StepKeys
from runtime.attention.streaming import StreamingAttention
from runtime.batch import Batch, build_batch
from runtime.config import RuntimeConfig
from runtime.draws import build_draws
from runtime.memory import MemoryPlan, available_bytes, format_bytes, plan_memory
from runtime.model.decoder import Attention, Decoder
from runtime.model.kv_cache import KVCache
from runtime.model.pages import KVPages
from runtime.model.pages_native import NativePages
from runtime.prompt_rows import hidden_sums, prompt_logprobs
from runtime.reach import Reach
from runtime.sampler.sampler import sample_tokens
from runtime.step import SampledToken, ScheduledSequence, StepOutput, StepPlan
from runtime.verification import verify_by_match

logger = logging.getLogger("runtime.runner")

RowSampler = Callable[[Sequence[ScheduledSequence], Tensor], dict[str, list[SampledToken]]]
"""From the entries that sample, and `1 + num_draft_tokens` rows of logits each, to tokens by sequence id."""


class ModelRunner:
    """Implements `runtime.step.Runner`. Calls must come one at a time, from any one thread.

    Args:
        memory: sizes of the pool and of the longest sequence, as `plan_memory` decides them.

    Attributes:
        sample: turns logits into tokens and verifies drafts; by match unless somebody sets another way.
        native_layers: computes all layers in one call where that is possible.
        layers_refusal: why it is not; empty where it is.
        triton_refusal: why attention does not run in Triton; empty when it does.
    """

    def __init__(self, decoder: Decoder, memory: MemoryPlan) -> None:
        self.decoder = decoder
        self.memory = memory
        self.sample: RowSampler = sample_and_match
        self.windows = decoder.config.windows
        if memory.reach.window is not None:
            self.windows = (memory.reach.window,) * decoder.config.num_layers
        self.cache = KVCache(decoder, memory)
        self.native_layers: NativeLayers | None = None
        self.layers_refusal = "keys and values are not in native pages"
        if isinstance(self.pages, NativePages):
            self.layers_refusal = refuse_layers(decoder)
        if isinstance(self.pages, NativePages) and not self.layers_refusal:
            self.native_layers = NativeLayers(decoder, self.pages, self.windows)
        has_exact_tokens = bool(self.cache.sinks or self.cache.recent or memory.reach.sinks)
        self.triton_refusal = refuse_triton(decoder.device, decoder.dtype, decoder.config.head_dim, has_exact_tokens)

    @property
    def pages(self) -> KVPages:
        return self.cache.pages

    @property
    def shares_blocks(self) -> bool:
        return not self.memory.kv_cache.recent

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.memory.num_host_blocks

    @property
    def block_size(self) -> int:
        return self.memory.block_size

    @property
    def max_model_len(self) -> int:
        return self.memory.max_model_len

    @property
    def reach(self) -> Reach:
        return self.memory.reach

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.decoder.config.eos_token_ids

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Moves blocks, computes the plan's spans in one forward pass, samples where a span ends its sequence and
        verifies the drafts there."""
        self.pages.memory.offload(plan.offloads)
        self.pages.memory.copy(plan.copies)
        self.pages.memory.restore(plan.restores)
        if not plan.entries:
            return StepOutput({})
        batch = build_batch(plan.entries, self.block_size, self.decoder.device, self.reach)
        self.pages.memory.clear(batch.fresh_blocks)
        hidden = self._forward(batch)
        return StepOutput(
            self._sample(hidden, batch) if batch.sampling else {},
            prompt_logprobs(self.decoder, hidden, batch),
            hidden_sums(self.decoder, hidden, batch),
        )

    def _forward(self, batch: Batch) -> Tensor:
        attention, run_layers = self._attention(batch), None
        if self.native_layers is not None and isinstance(attention, NativeAttention):
            run_layers = partial(self.native_layers, attention=attention)
        return self.decoder.forward(batch.token_ids, batch.positions, attention, run_layers)

    def _attention(self, batch: Batch) -> Attention:
        if isinstance(self.pages, NativePages):
            return NativeAttention(self.pages, batch, self.windows, self.cache.scheme.rotate)
        keys = StepKeys(self.cache, batch, self.cache.place(self.decoder, batch.entries))
        if not self.triton_refusal:
            return TritonAttention(keys, self.windows)
        reach = self.reach
        if reach.window is not None and reach.sinks:
            return StreamingAttention(keys, reach.sinks, reach.window, self.decoder.rotary)
        return PagedAttention(keys, self.windows)

    def _sample(self, hidden: Tensor, batch: Batch) -> dict[str, list[SampledToken]]:
        return self.sample(batch.sampling, self.decoder.logits(hidden.index_select(0, batch.sample_rows)))


def sample_and_match(entries: Sequence[ScheduledSequence], logits: Tensor) -> dict[str, list[SampledToken]]:
    """Tokens by sequence id, of `1 + num_draft_tokens` rows of logits `[R, V]` per entry, in order."""
    return verify_by_match(entries, sample_tokens(logits, [draw for entry in entries for draw in build_draws(entry)]))


def build_runner(decoder: Decoder, config: RuntimeConfig) -> ModelRunner:
    """A runner whose pool fits the budget of `config`.

    Raises:
        ToolkitError: a sequence of `max_model_len` tokens does not fit in the pool, or the pool not in memory.
    """
    plan = plan_memory(decoder.config, decoder.nbytes, decoder.dtype.itemsize, config)
    check_fits(plan, decoder.device)
    for note in plan.kv_choice.notes:
        logger.warning("KV cache %s: %s", plan.kv_cache, note)
    if config.attention_window is not None:
        decoder = replace(decoder, rotary=decoder.rotary.exact())
    return ModelRunner(decoder, plan)


def check_fits(plan: MemoryPlan, device: torch.device) -> None:
    """Refuses pools that do not fit in the free memory of the device and the host.

    Raises:
        ToolkitError: with the numbers.
    """
    host = torch.device("cpu")
    wanted = Counter({device: plan.kv_bytes}) + Counter({host: plan.host_bytes})
    for where, size in wanted.items():
        free = available_bytes(where)
        if size > free:
            raise ToolkitError(
                f"KV blocks of {format_bytes(size)} do not fit in {format_bytes(free)} of free {where.type} memory",
                "Allow less KV memory or fewer blocks",
            )

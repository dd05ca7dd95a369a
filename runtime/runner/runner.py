"""The part below the torch line: one object with one method. Holds the model and the pages of keys and values."""

from __future__ import annotations

import gc
import logging
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from compress.common.device import available_bytes, on_device
from runtime.adapters.store import DeviceAdapters, slot_bytes
from runtime.backends.kv_pages import BlockMemory, KVCache, KVPages
from runtime.backends.model import Model
from runtime.backends.registry import AUTO, choose_step_kernels
from runtime.backends.state_memory import StateMemory, step_states
from runtime.core.attention_window import AttentionWindow
from runtime.core.batch import Batch, build_batch, build_sampling_metadata, fresh_blocks, slots_of
from runtime.core.config import RuntimeConfig
from runtime.core.draft_states import StateCosts
from runtime.core.draft_tree import follow
from runtime.core.memory_plan import MemoryPlan
from runtime.core.progress import Report, ignore
from runtime.core.state_rows import build_state_rows
from runtime.core.step import ComputedStep, SampledToken, ScheduledSequence, StepOutput, StepPlan, SubmittedStep
from runtime.memory.plan import check_fits, plan_memory
from runtime.parallel.group import Group
from runtime.parallel.steps import KeptAdapters, share_plan, tell_plan
from runtime.runner.capture import Capture, CudaCapture
from runtime.runner.micro_batches import LEAST_TOKENS, Piece, split_step
from runtime.runner.pending_step import DrawnTokens, PendingStep, TokenCopies, unread_token
from runtime.runner.prompts import pooled_states, prompt_logprobs
from runtime.runner.step_buffers import StepBuffers
from runtime.runner.step_graphs import Kind, StepGraphs
from runtime.runner.warm_up import warm_up
from runtime.sampling.sampler import Drawn, choose_sampler, sample_step, sample_tokens
from runtime.speculative.verify import verify_by_match

logger = logging.getLogger("runtime.runner.runner")

RowSampler = Callable[[abc.Sequence[ScheduledSequence], Tensor, Drawn | None], dict[str, list[SampledToken]]]
"""From the entries that sample, and `1 + num_draft_tokens` rows of logits each, to tokens by sequence id. Of captured
steps it gets what is drawn already."""


class StepObserver(Protocol):
    """Reads the hidden states of every step, and keeps something of its own for the tokens of each block."""

    @property
    def memory(self) -> BlockMemory:
        """Memory whose blocks move as those of the runner."""

    def observe(self, batch: Batch, hidden: Tensor, tokens: Mapping[str, list[SampledToken]]) -> None:
        """Reads a computed step: final hidden states `[T, H]`, and the sampled tokens."""


class ModelRunner:
    """Implements `runtime.core.step.Runner`. Calls must come one at a time, from any one thread.

    Args:
        memory: sizes of the pool and of the longest sequence, as `plan_memory` decides them.
        attention_backend: the backend whose attention comes first where it can serve the model.
        programmatic_launch: whether kernels of a GPU overlap, see `ComputeOptions`.
        tell: is told every plan before it is computed, for ranks that compute it too.

    Attributes:
        sample: turns logits into tokens and verifies drafts; exactly unless replaced.
        states: recurrent states; None for a model without them.
        kernels: what computes attention and the layers of a step, and why.
        graphs: runs steps of one token per sequence, and drafts, from CUDA graphs; None where nothing is captured.
        graphs_reason: why nothing is; empty where it is.
        observer: reads every step; None for none.
        adapters: LoRA adapters on the device; None for a model without them.
        later: captures that the first answers do not need, for idle time.
    """

    def __init__(
        self,
        decoder: Model,
        memory: MemoryPlan,
        attention_backend: str = AUTO,
        programmatic_launch: str = AUTO,
        tell: Callable[[StepPlan], object] = lambda plan: None,
    ) -> None:
        self.decoder, self._tell = decoder, tell
        self.memory, states = memory, memory.states
        self.num_blocks, self.num_host_blocks = memory.num_blocks, memory.num_host_blocks
        self.num_state_slots, self.num_host_states = states.num_slots, states.num_host_slots
        # Computing this many tokens takes about as long as reading the weights: kernels of 4 and 8 bits on a CPU take
        # 4 to 7 (docs/serving-cpu.md, between M=1 and M=8), tensor cores in 16 bits 75 to 300 by their data sheets.
        tokens_per_read = 5 if decoder.device.type == "cpu" else 100
        self.state_costs = StateCosts(states.slot_bytes, memory.weight_bytes // tokens_per_read)
        self.block_size, self.max_model_len = memory.block_size, memory.max_model_len
        self.attention_window: AttentionWindow = memory.attention_window
        self.shares_blocks = not memory.kv_cache.residual_length
        self.vocab_size, self.eos_token_ids = decoder.config.spec.vocab_size, decoder.config.eos_token_ids
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self.sampler = choose_sampler(decoder.device, dtype)
        self.sample: RowSampler = partial(sample_and_match, sampler=self.sampler)
        self.kernels = choose_step_kernels(decoder, memory, attention_backend, programmatic_launch)
        self.expert_caches = [slots.cache for slots in decoder.expert_slots]
        self.states: StateMemory | None = None
        if decoder.config.state_fields:
            sizes = self.num_state_slots, decoder.dtype, decoder.device, self.num_host_states
            self.states = StateMemory(decoder.config.state_fields, *sizes, kept=states.dtype)
        self.observer: StepObserver | None = None
        self.adapters: DeviceAdapters | None = None
        self.later: abc.Sequence[Callable[[], object]] = ()
        self.graphs: StepGraphs | None = None
        self._token_copies = TokenCopies(memory.num_sequences, decoder.device)
        self._pending: PendingStep | None = None
        self._drawn: DrawnTokens | None = None
        self.graphs_reason = self._graphs_unsupported_reason()
        if not self.graphs_reason:
            self.capture_steps(CudaCapture(decoder.device))

    def capture_steps(self, capture: Capture) -> None:
        """From now on steps are captured when they are first needed."""
        buffers = StepBuffers(self.decoder, self.memory)
        fused = self.sampler.fused
        draw = partial(sample_step, fused) if fused else None
        self.graphs = StepGraphs(self._logits, buffers, capture, draw)

    def hand_to(self, observer: StepObserver) -> None:
        """Lets an observer read every step from now on. Captured steps keep no hidden states, so none is captured."""
        self.observer = observer
        self.graphs, self.graphs_reason = None, "the drafter reads hidden states"

    @property
    def cache(self) -> KVCache:
        return self.kernels.cache

    @property
    def pages(self) -> KVPages:
        return self.kernels.cache.pages

    def execute(self, plan: StepPlan) -> StepOutput:
        """Computes a plan, and waits for it."""
        return self.submit(plan).result()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Moves blocks, computes the plan's spans, samples where a span ends its sequence, and verifies drafts there.

        A step that a captured one can compute is replayed; others run in one eager forward pass. Where the device draws
        one token for each sequence that samples, and nothing else is wanted, they are read later.
        """
        self._tell(plan)
        with on_device(self.decoder.device):
            if self._pending is not None:
                self._pending.leave()
            self._move(plan)
            step = self._compute(plan.entries) if plan.entries else ComputedStep(StepOutput({}))
        self._pending = step if isinstance(step, PendingStep) else None
        return step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Launches what computes a plan that no captured step serves, and reads nothing of it."""
        with on_device(self.decoder.device):
            batch = build_batch(plan.entries, self.block_size, self.decoder.device, self.memory.reach)
            self._draw(self._forward(batch), batch)

    @torch.inference_mode()
    def launch_head(self, num_rows: int) -> None:
        """Launches what computes logits of some tokens."""
        with on_device(self.decoder.device):
            shape = num_rows, self.decoder.config.spec.hidden_size
            self.decoder.logits(torch.zeros(shape, dtype=self.decoder.dtype, device=self.decoder.device))

    @torch.inference_mode()
    def prepare(self, graphs: StepGraphs, kind: Kind, *, capture: bool) -> None:
        """Launches a kind of captured step over rows of padding, or captures it."""
        with on_device(self.decoder.device):
            (graphs.capture if capture else graphs.launch)(kind)

    def _compute(self, entries: abc.Sequence[ScheduledSequence]) -> SubmittedStep:
        if self.graphs is None:
            return self._run_eagerly(entries)
        if reason := self.graphs.unsupported_reason(entries):
            return self._run_eagerly(entries, reason)
        return self._replay(self.graphs, entries)

    def _read_late(
        self,
        entries: abc.Sequence[ScheduledSequence],
        sampling: abc.Sequence[ScheduledSequence],
        logits: Tensor,
        drawn: Drawn,
        path: str,
    ) -> PendingStep:
        """A step whose tokens are drawn. Those that sample may be in another order than the entries of the plan."""
        rows = {entry.sequence.id: row for row, entry in enumerate(sampling)}
        self._drawn = DrawnTokens(drawn.tokens, [rows.get(entry.sequence.id, 0) for entry in entries])
        sample = partial(self._decide, sampling, logits, drawn)
        draws = [draw for group in drawn.draws for draw in group]
        logprobs = partial(self.sampler.drawn_logprobs, logits, drawn.tokens, draws)
        return PendingStep(sampling, self._token_copies.send(drawn.tokens), sample, path, logprobs)

    def _decide(
        self, entries: abc.Sequence[ScheduledSequence], logits: Tensor, drawn: Drawn, tokens: Tensor
    ) -> dict[str, list[SampledToken]]:
        """Makes tokens by sequence id of those that were drawn, and have come to the host, as have those before."""
        known = zip(entries, drawn.draws, strict=True)
        draws = [group if group[0].unread is None else build_sampling_metadata(entry) for entry, group in known]
        with on_device(self.decoder.device):
            return self.sample(entries, logits, Drawn(tokens, draws))

    def _move(self, plan: StepPlan) -> None:
        """Moves blocks and states. No entry of a plan reads a block, or a state, that another one writes: what a step
        computes is shared from the next one on. So it does not matter which entries are computed first."""
        # The last block of a sequence is the newest: the pool gives out new ones in their order.
        last_blocks = (entry.sequence.block_ids[-1:] for entry in plan.entries)
        num_blocks = max(chain.from_iterable(last_blocks), default=-1) + 1
        for memory in self.memories:
            memory.reach(num_blocks)
            memory.offload(plan.offloads)
            memory.copy(plan.copies)
            memory.restore(plan.restores)
        if self.states is not None:
            self.states.offload(plan.state_offloads)
            self.states.restore(plan.state_restores)

    def _run_eagerly(self, entries: abc.Sequence[ScheduledSequence], path: str = "") -> SubmittedStep:
        batch = build_batch(entries, self.block_size, self.decoder.device, self.memory.reach)
        if self._drawn is not None:
            rows = accumulate((entry.num_tokens for entry in batch.entries[:-1]), initial=0)
            self._drawn.put_into(batch.token_ids, list(rows), batch.entries)
        for memory in self.memories:
            memory.clear(batch.fresh_blocks)
        hidden = self._forward(batch)
        if self._draws_on_device(batch):
            return self._read_late(entries, batch.sampling, *self._draw(hidden, batch), path)
        tokens = self._sample(hidden, batch) if batch.sampling else {}
        self._keep_branches(batch.sampling, tokens)
        if self.observer is not None:
            self._show(self.observer, batch, hidden, tokens)
        return ComputedStep(
            StepOutput(
                tokens,
                prompt_logprobs(self.decoder, self.sampler, hidden, batch),
                pooled_states(self.decoder, hidden, batch),
                path,
                expert_lookups=(
                    sum(cache.queries for cache in self.expert_caches),
                    sum(cache.hits for cache in self.expert_caches),
                ),
            )
        )

    def _draws_on_device(self, batch: Batch) -> bool:
        """Whether the tokens are all that is wanted of a step, and the device draws them without the host."""
        if self.sampler.fused is None or self.observer is not None or self.expert_caches or batch.prompt_rows:
            return False
        return not any(e.num_draft_tokens or e.sequence.request.sampling.needs_tokens for e in batch.sampling)

    def _draw(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Drawn]:
        """Logits `[n, V]` of the entries that sample, and the tokens drawn from them."""
        if not batch.sampling:
            return hidden[:0], Drawn(batch.sample_rows, [])
        logits = self.decoder.logits(hidden.index_select(0, batch.sample_rows))
        draws = [build_sampling_metadata(entry, unread_token(self._drawn, entry)) for entry in batch.sampling]
        return logits, Drawn(self.sampler.choose(logits, [draw for group in draws for draw in group]), draws)

    def _show(
        self, observer: StepObserver, batch: Batch, hidden: Tensor, tokens: Mapping[str, list[SampledToken]]
    ) -> None:
        """Shows the observer a computed step. If it raises, no request fails: it sees no step from then on."""
        try:
            observer.observe(batch, self.decoder.final_norm(hidden), tokens)
        except Exception:  # a kernel may raise anything; the step is complete without it
            logger.exception("the drafter failed to read a step; it drafts nothing from now on")
            self.observer = None

    @property
    def memories(self) -> list[BlockMemory]:
        """Memories whose blocks move together."""
        return [self.pages.memory, *([] if self.observer is None else [self.observer.memory])]

    def _replay(self, graphs: StepGraphs, entries: abc.Sequence[ScheduledSequence]) -> SubmittedStep:
        self.pages.memory.clear([block for entry in entries for block in fresh_blocks(entry, self.block_size)])
        sampling, logits, drawn, failure = graphs.run(entries, self._drawn)
        path = failure or "recorded"
        if drawn is not None and not any(entry.num_draft_tokens for entry in sampling):
            return self._read_late(entries, sampling, logits, drawn, path)
        tokens = self.sample(sampling, logits, drawn)
        self._keep_branches(sampling, tokens)
        return ComputedStep(StepOutput(tokens, path=path))

    def _graphs_unsupported_reason(self) -> str:
        """Why no step can be captured; empty when some can."""
        if self.decoder.device.type != "cuda":
            return "captured steps run on NVIDIA GPUs"
        if self.kernels.layers is None and self.states is None:
            return f"layers run one by one: {self.kernels.layers_reason}"
        if not self.kernels.records:
            return f"{self.kernels.layers_reason} cannot be captured"
        if self.expert_caches:
            return "experts come from host memory when they are chosen"
        return "the first tokens are kept exactly, and computed when a sequence begins" if self.cache.sinks else ""

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states `[T, H]`. Stages compute parts of a step at the same time."""
        end = self.decoder.end
        if end is None:
            return self._forward_part(batch)
        least = LEAST_TOKENS[self.decoder.device.type]
        parts = split_step(batch.entries, end.num_stages, least, self.block_size)
        return end.collect(self._forward_part(batch) if len(parts) == 1 else self._forward_parts(parts))

    def _forward_parts(self, parts: abc.Sequence[abc.Sequence[Piece]]) -> Tensor:
        found: dict[int, Tensor] = {}
        for pieces in parts:
            rows = {id(piece.entry): piece.row for piece in pieces}
            entries = [piece.entry for piece in pieces]
            batch = build_batch(entries, self.block_size, self.decoder.device, self.memory.reach)
            hidden = self._forward_part(batch).split([entry.num_tokens for entry in batch.entries])
            found |= {rows[id(entry)]: states for entry, states in zip(batch.entries, hidden, strict=True)}
        return torch.cat([found[row] for row in sorted(found)])

    def _forward_part(self, batch: Batch) -> Tensor:
        attention, layers, decoder = self.kernels.attention(batch), self.kernels.layers, self.decoder
        if self.adapters is not None and self.adapters.begin(batch.entries):
            layers, decoder = self.adapters.layers, self.adapters.model
        run_layers = None if layers is None else partial(layers, attention=attention)
        if self.states is None:
            return decoder.forward(batch.token_ids, batch.positions, attention, run_layers)
        rows = batch.state_rows or build_state_rows(batch.entries, self.num_state_slots, self.decoder.device)
        states = step_states(self.states, rows)
        return decoder.forward(batch.token_ids, batch.positions, attention, run_layers, states)

    def _logits(self, batch: Batch) -> Tensor:
        """Logits of the rows of a captured step, in the dtype of the head."""
        hidden = self._forward(batch)
        rows = batch.sample_rows
        return self.decoder.head_logits(hidden.index_select(0, rows) if len(rows) else hidden)

    def _keep_branches(
        self, entries: abc.Sequence[ScheduledSequence], tokens: Mapping[str, list[SampledToken]]
    ) -> None:
        """Moves keys and values of accepted branches to where the next step looks for them."""
        moves = [move for entry in entries if entry.has_tree for move in self._moves(entry, tokens)]
        if moves:
            self.pages.move(*zip(*moves, strict=True))

    def _moves(self, entry: ScheduledSequence, tokens: Mapping[str, list[SampledToken]]) -> list[tuple[int, int]]:
        accepted = [token.token_id for token in tokens[entry.sequence.id]]
        slots = slots_of(entry, self.block_size)[1:]
        path = follow(entry.sequence.draft_token_ids, entry.draft_parents, accepted)
        return [(slots[number], slots[place]) for place, number in enumerate(path) if place != number]

    def _sample(self, hidden: Tensor, batch: Batch) -> dict[str, list[SampledToken]]:
        return self.sample(batch.sampling, self.decoder.logits(hidden.index_select(0, batch.sample_rows)), None)


def sample_and_match(
    entries: abc.Sequence[ScheduledSequence],
    logits: Tensor,
    drawn: Drawn | None = None,
    sampler: Callable[..., list[SampledToken]] = sample_tokens,
) -> dict[str, list[SampledToken]]:
    """Tokens by sequence id, of `1 + num_draft_tokens` rows of logits `[R, V]` per entry, in order."""
    groups = list(map(build_sampling_metadata, entries)) if drawn is None else drawn.draws
    draws = [draw for group in groups for draw in group]
    tokens = sampler(logits, draws, None if drawn is None else drawn.tokens)
    if len(tokens) > len(entries):
        return verify_by_match(entries, tokens)
    return {entry.sequence.id: [token] for entry, token in zip(entries, tokens, strict=True)}


def build_runner(
    decoder: Model, config: RuntimeConfig, report: Report = ignore, group: Group | None = None
) -> ModelRunner:
    """A runner whose pool fits the budget of `config`. On a GPU it has computed the largest steps, so that what serves
    later finds its memory.

    Args:
        report: is told how far it is.
        group: of the ranks that share the model; the first one's runner tells others what to compute.

    Raises:
        ToolkitError: a sequence of `max_model_len` tokens does not fit in the pool, or pool and steps not in memory.
    """
    on_gpu = decoder.device.type == "cuda"
    if on_gpu:
        gc.collect()  # an unused runner may still hold its pool
        torch.cuda.empty_cache()
    adapter_bytes = slot_bytes(decoder, config) if config.serves_adapters else 0
    free = available_bytes(decoder.device) - adapter_bytes if on_gpu else None
    sizes = decoder.nbytes + adapter_bytes, decoder.dtype.itemsize
    plan = share_plan(plan_memory(decoder.config, *sizes, config, free), group)
    plan = replace(plan, expert_bytes=sum(slots.host_nbytes for slots in decoder.expert_slots))
    check_fits(plan, decoder.device)
    for note in plan.kv_choice.notes:
        logger.warning("KV cache %s: %s", plan.kv_cache, note)
    if plan.states.measured is not None and plan.states.measured.is_costly:
        logger.warning("recurrent states in %s: measured %s", plan.states.dtype, plan.states.measured)
    # By what was asked for, not by what memory allows: answers must not depend on the machine.
    length = min(config.max_model_len or 0, decoder.config.context_length)
    if length > decoder.config.default_length:
        decoder = decoder.for_length(length)
    if config.attention_window is not None:
        decoder = decoder.for_streams()
    tell = partial(tell_plan, group, KeptAdapters(config.max_cpu_loras))
    runner = ModelRunner(decoder, plan, config.attention_backend, config.programmatic_launch, tell)
    if config.serves_adapters:
        runner.adapters = DeviceAdapters(decoder, config.max_loras, runner.kernels.adapt, group)
    if on_gpu:
        runner.later = warm_up(runner, config, report)
        for slots in decoder.expert_slots:
            slots.fill()  # the largest steps chose others
    return runner

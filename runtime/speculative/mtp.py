"""Drafts by the model's own head of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

The head reads the hidden states of every step of the target, so its first draft token costs no pass of its own; each
further one is a pass over the head's single block, which reads its own state in place of the target's. Its keys and
values lie in pages with the block ids of the target: cached prefixes, forks, preemption and blocks in host memory need
nothing more. The key at the last token of a shared block is made with the token that followed there, which may be
another one in a sequence that shares it; then a draft token may be worse, and never an accepted one.
Passes after the first write to blocks of their own, so a draft changes nothing that the next step reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.common.device import on_device
from runtime.backends.kv_pages import BlockMemory
from runtime.backends.registry import choose_step_kernels
from runtime.core.batch import Batch, build_batch, upload
from runtime.core.memory_plan import MemoryPlan
from runtime.core.request import Sequence, Status
from runtime.core.step import BlockCopy, SampledToken, ScheduledSequence
from runtime.model.mtp import MtpHead
from runtime.runner.runner import RowSampler, sample_and_match
from runtime.sampling.sampler import choose_sampler
from runtime.speculative.proposer import DraftRequest
from runtime.speculative.shadow import Shadow


def draft_blocks(num_draft_tokens: int, block_size: int) -> int:
    """Returns how many blocks the passes after the first write to at most, for one sequence."""
    return -(-(num_draft_tokens + block_size - 2) // block_size) if num_draft_tokens > 1 else 0


class HeadRunner:
    """Runs a head over batches. `memory` plans the pages of its block."""

    def __init__(self, head: MtpHead, memory: MemoryPlan) -> None:
        self.head, self.block_size = head, memory.block_size
        self.kernels = choose_step_kernels(head.decoder, memory)

    @property
    def memory(self) -> BlockMemory:
        return self.kernels.cache.pages.memory

    def run(self, batch: Batch, following: Iterable[int], hidden: Tensor) -> Tensor:
        """Computes states `[T, H]` of the tokens that follow those of the batch, and hidden states `[T, H]` of it."""
        token_ids = upload(following, self.head.decoder.device)
        attention, layers = self.kernels.attention(batch), self.kernels.layers
        run_layers = None if layers is None else partial(layers, attention=attention)
        return self.head.forward(token_ids, batch.positions, hidden, attention, run_layers)


@dataclass(frozen=True, slots=True)
class _Last:
    """State `[H]` of the head at the last token but one, of a sequence with `num_tokens`."""

    num_tokens: int
    state: Tensor


class MtpDrafter:
    """Drafts with a head. It is the observer of the target's runner, too.

    Args:
        runner: of the head. Blocks from `num_shared` on are those that drafts are written to.
        num_shared: blocks of the target.
        per_sequence: blocks that the drafts of a sequence are written to.
        noise: mixed into the seeds; 0 samples with the target's noise, as exact verification wants.
    """

    def __init__(self, runner: HeadRunner, num_shared: int, per_sequence: int, *, noise: int = 0) -> None:
        self.runner = runner
        decoder = runner.head.decoder
        sampler = choose_sampler(decoder.device, torch.promote_types(decoder.dtype, torch.float32))
        self.sample: RowSampler = partial(sample_and_match, sampler=sampler)
        self._noise = noise
        self._first, self._each = num_shared, per_sequence
        self._last: dict[Sequence, _Last] = {}
        self._shadows: dict[Sequence, Shadow] = {}

    @property
    def memory(self) -> BlockMemory:
        return self.runner.memory

    def observe(self, batch: Batch, hidden: Tensor, tokens: Mapping[str, list[SampledToken]]) -> None:
        """Computes the head over all tokens of a step, and keeps its state where the next token was sampled."""
        following = [token for entry in batch.entries for token in _following(entry, tokens)]
        states = self.runner.run(batch, following, hidden)
        self._last = {sequence: last for sequence, last in self._last.items() if sequence.status is Status.RUNNING}
        first = 0
        for entry in batch.entries:
            if drawn := tokens.get(entry.sequence.id):
                row = first + entry.num_tokens - entry.num_draft_tokens + len(drawn) - 2
                self._last[entry.sequence] = _Last(entry.sequence.num_tokens + len(drawn), states[row])
            first += entry.num_tokens

    @torch.inference_mode()
    def propose(self, requests: ListOf[DraftRequest]) -> None:
        self._shadows = {sequence: self._shadow(sequence) for sequence, _ in requests}
        counts = {self._shadows[each]: count for each, count in requests if count and self._is_current(each)}
        states = {shadow: last.state for each, last in self._last.items() if (shadow := self._shadows.get(each))}
        with on_device(self.runner.head.decoder.device):
            try:
                self._draft(counts, states)
            finally:
                for shadow in counts:
                    shadow.take_back()
        for sequence, _ in requests:
            sequence.draft_token_ids = self._shadows[sequence].draft

    def _draft(self, counts: Mapping[Shadow, int], states: Mapping[Shadow, Tensor]) -> None:
        active = self._sample(counts, [states[shadow] for shadow in counts])
        if active:
            self._copy_last_blocks(active)
        while active:
            entries = [ScheduledSequence(shadow.own, shadow.own.num_tokens - 2, 1) for shadow in active]
            batch = build_batch(entries, self.runner.block_size, self.runner.head.decoder.device)
            self.memory.clear(batch.fresh_blocks)
            by_id = {shadow.own.id: shadow for shadow in active}
            ordered = [by_id[entry.sequence.id] for entry in batch.entries]
            fed = self.runner.head.feedback(torch.stack([states[shadow] for shadow in ordered]))
            found = self.runner.run(batch, (shadow.own.token_ids[-1] for shadow in ordered), fed)
            states = dict(zip(ordered, found, strict=True))
            active = self._sample({shadow: active[shadow] for shadow in ordered}, list(found))

    def _sample(self, counts: Mapping[Shadow, int], states: ListOf[Tensor]) -> dict[Shadow, int]:
        """Samples a draft token of each state; returns the sequences that need more, with the numbers asked for."""
        if not counts:
            return {}
        entries = [ScheduledSequence(shadow.own, shadow.own.num_tokens - 1, 1) for shadow in counts]
        tokens = self.sample(entries, self.runner.head.decoder.logits(torch.stack(list(states))), None)
        drafted = {shadow: count for shadow, count in counts.items() if shadow.take(tokens.get(shadow.own.id))}
        return {shadow: count for shadow, count in drafted.items() if len(shadow.draft) < count}

    def _copy_last_blocks(self, active: Iterable[Shadow]) -> None:
        """Gives each sequence blocks for its drafts, the first of them a copy of its last one if that is not full."""
        copies, size = [], self.runner.block_size
        for place, shadow in enumerate(active):
            num_full, filled = divmod(shadow.num_known - 1, size)
            first = self._first + place * self._each
            if filled:
                copies.append(BlockCopy(shadow.own.block_ids[num_full], first, filled))
            shadow.own.block_ids = [*shadow.own.block_ids[:num_full], *range(first, first + self._each)]
        self.memory.copy(copies)

    def _is_current(self, sequence: Sequence) -> bool:
        last = self._last.get(sequence)
        return last is not None and last.num_tokens == sequence.num_tokens

    def _shadow(self, sequence: Sequence) -> Shadow:
        shadow = self._shadows.get(sequence) or Shadow.of(sequence, self._noise)
        shadow.follow(sequence)
        shadow.own.block_ids = sequence.block_ids
        return shadow


def _following(entry: ScheduledSequence, tokens: Mapping[str, list[SampledToken]]) -> list[int]:
    """Returns the token after each of a span; 0 where it is not known, after drafts that were rejected."""
    known = entry.sequence.token_ids[entry.start + 1 : entry.start + entry.num_tokens + 1]
    known += [max(token.token_id, 0) for token in tokens.get(entry.sequence.id, ())]
    return (known + [0] * entry.num_tokens)[: entry.num_tokens]

"""Drafts by a smaller model with the same vocabulary, for all sequences of a batch together.

The draft model keeps a shadow of each sequence: the same tokens, with blocks of its own pool. It samples with the
target's parameters and, for exact verification, with the target's noise: where both models agree about a distribution
they sample the same token, so sampled text is drafted nearly as well as greedy text.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import replace
from pathlib import Path

from compress.checkpoint.reader import PackedCheckpoint, RoundedCheckpoint
from compress.checkpoint.scheme import GROUP_SIZES
from compress.checkpoint.weights import Int, Scheme
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.request import Sequence
from runtime.core.step import Runner, ScheduledSequence, StepPlan
from runtime.model.decoder import Decoder
from runtime.model.loader import load_layers
from runtime.speculative.proposer import DraftRequest
from runtime.speculative.shadow import Shadow, StateSlots

OTHER_NOISE = 0x5DEECE66D1234567
"""Mixed into a seed to get independent noise."""


class ModelDrafter:
    """Drafts with any runner. A sequence without free blocks or slots for recurrent states, or whose prompt is still
    being computed, gets no draft.

    Args:
        runner: runner of the draft model.
        config: block size and token budget of a call.
        same_noise: sample with the target's noise; False samples independently, as rejection sampling requires.
    """

    def __init__(self, runner: Runner, config: RuntimeConfig, *, same_noise: bool = True) -> None:
        self.runner = runner
        self.config = config
        self._noise = 0 if same_noise else OTHER_NOISE
        self._free = list(range(runner.num_blocks))
        slots = range(runner.num_state_slots)
        self._free_slots: list[StateSlots] = list(zip(slots[::2], slots[1::2], strict=False))
        self._shadows: dict[Sequence, Shadow] = {}

    def propose(self, requests: ListOf[DraftRequest]) -> None:
        self._forget_all_but({sequence for sequence, _ in requests})
        shadows = {sequence: self._shadow(sequence, count) for sequence, count in requests if count}
        active = {shadow: count for (sequence, count) in requests if (shadow := shadows.get(sequence)) is not None}
        drafting = list(active)
        try:
            while active:
                active = self._advance(active)
        finally:
            for shadow in drafting:
                shadow.take_back()
        for sequence, _ in requests:
            shadow = shadows.get(sequence)
            sequence.draft_token_ids = shadow.draft if shadow is not None else []

    def _advance(self, active: dict[Shadow, int]) -> dict[Shadow, int]:
        """Runs one forward pass, which gives each sequence that is up to date one more draft token.

        Returns:
            Sequences that need more, with the numbers of tokens asked for.
        """
        entries: list[ScheduledSequence] = []
        budget = self.config.step_tokens
        for shadow in active:
            own = shadow.own
            count = min(own.num_tokens - own.num_computed_tokens, self.config.max_span_tokens, budget)
            if count:
                entries.append(shadow.plan(count))
                budget -= count
        tokens = self.runner.submit(StepPlan(tuple(entries))).result().tokens
        for entry in entries:
            entry.sequence.num_computed_tokens += entry.num_tokens
        drafted = {shadow: count for shadow, count in active.items() if shadow.take(tokens.get(shadow.own.id))}
        return {shadow: count for shadow, count in drafted.items() if len(shadow.draft) < count}

    def _shadow(self, sequence: Sequence, count: int) -> Shadow | None:
        """Returns the sequence's shadow with its new tokens and blocks for `count` draft tokens; None without room."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            shadow = Shadow.of(sequence, self._noise)
        shadow.follow(sequence)
        # The last draft token is never computed here.
        num_computed = sequence.num_tokens + count - 1
        missing = -(-num_computed // self.config.block_size) - len(shadow.own.block_ids)
        lacks_slots = bool(self.runner.num_state_slots) and shadow.state_slots is None
        if missing > len(self._free) or num_computed > self.runner.max_model_len:
            return None
        if lacks_slots and not self._free_slots:
            return None
        if lacks_slots:
            shadow.state_slots = self._free_slots.pop()
        shadow.own.block_ids += [self._free.pop() for _ in range(missing)]
        self._shadows[sequence] = shadow
        return shadow

    def _forget_all_but(self, sequences: set[Sequence]) -> None:
        for sequence in self._shadows.keys() - sequences:
            shadow = self._shadows.pop(sequence)
            self._free += shadow.own.block_ids
            self._free_slots += filter(None, [shadow.state_slots])


def skip_layers(target: Decoder, num_skipped: int | None = None) -> Decoder:
    """Makes a draft model of the target by skipping evenly spaced layers between the first and the last.

    Each middle layer of a residual network changes the hidden state a little, so the rest still predicts well (Zhang et
    al.: Draft & Verify, arXiv:2309.08168, section 3).

    Args:
        num_skipped: None skips half of the layers.

    Raises:
        ToolkitError: fewer than one layer is skipped, or the first and last would have to be.
    """
    count = len(target.layers)
    skipped = count // 2 if num_skipped is None else num_skipped
    if not 1 <= skipped <= count - 2:
        raise ToolkitError(
            f"{skipped} of {count} layers cannot be skipped: the first and the last stay",
            f"Use --speculative-model self:skip=N with N from 1 to {count - 2}" if count > 2 else "Use another drafter",
        )
    # Kept layers at even distances, from the first to the last.
    kept = [round(index * (count - 1) / (count - skipped - 1)) for index in range(count - skipped)]
    return replace(target, config=target.config.keep_layers(kept), layers=[target.layers[index] for index in kept])


def round_layers(target: Decoder, path: str | Path, bits: int, kernels: str = "auto") -> Decoder:
    """Makes a draft model of the target by rounding its linears to `bits` bits in the smallest asymmetric groups.

    Takes seconds and no calibration. Reads the checkpoint in folder `path` again and writes nothing.

    Raises:
        ToolkitError: the weights have `bits` bits or fewer already.
    """
    source = PackedCheckpoint.open(path)
    modules = [linear.name for linear in target.config.spec.linears()]
    schemes = {module: _scheme(source, module, bits) for module in modules}
    layers, description = load_layers(RoundedCheckpoint.of(source, schemes), target, kernels)
    return replace(target, layers=layers, description=tuple(description))


def _scheme(source: PackedCheckpoint, module: str, bits: int) -> Scheme:
    stored, (rows, columns) = source.scheme(module), source.shape(module)
    taken = 16.0 if stored is None else stored.bits_per_weight(rows, columns)
    if taken <= bits:
        raise ToolkitError(
            f"{module} has {taken:g} bits already, so {bits} bits make no faster draft",
            "Use --speculative-model self:skip, ngram, or fewer bits",
        )
    return Int(bits, next((size for size in GROUP_SIZES if columns % size == 0), None), symmetric=False)

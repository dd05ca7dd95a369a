"""Guesses by a smaller model over the same vocabulary, for all sequences together. Knows its runner only: no torch.

The draft model sees each sequence through a shadow: the same tokens, and blocks of its own pool. It draws with the
target's sampling parameters and, when drafts are verified by match, with the target's noise: where both models agree
about a distribution they also draw the same token, so sampled text is guessed nearly as well as greedy text.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint.reader import PackedCheckpoint, RoundedCheckpoint
from compress.checkpoint.scheme import GROUP_SIZES, Scheme
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.request import Sequence
from runtime.core.step import Runner, SampledToken, ScheduledSequence, StepPlan
from runtime.model.decoder import Decoder
from runtime.model.loader import HEAD, expected_linears, load_layers
from runtime.speculative.proposer import Wish

OTHER_NOISE = 0x5DEECE66D1234567
"""Changes a seed into one whose noise has nothing to do with it."""


@dataclass(eq=False, slots=True)
class _Shadow:
    """What the draft model holds of one sequence.

    Attributes:
        own: its tokens, then the guesses of the last round; its blocks in the draft model's pool.
        num_known: tokens of `own` that are no guesses.
    """

    own: Sequence
    num_known: int = 0

    def follow(self, sequence: Sequence) -> None:
        """Takes over the tokens that were added since the last round; keys and values of right guesses stay good."""
        own, known = self.own, sequence.token_ids
        agree = self.num_known
        while agree < min(len(known), own.num_tokens) and own.token_ids[agree] == known[agree]:
            agree += 1
        own.token_ids[agree:] = known[agree:]
        # The last token is computed in any case, since its logits are wanted.
        own.num_computed_tokens = min(own.num_computed_tokens, agree, len(known) - 1)
        self.num_known = len(known)
        own.constraint = sequence.constraint

    def take(self, drawn: list[SampledToken] | None) -> bool:
        """Appends a guess; False when there is none, or none that may stand there."""
        if drawn is None or drawn[0].error:
            return False
        constraint = self.own.constraint
        if constraint is not None and not constraint.accept([drawn[0].token_id]):
            return False
        self.own.token_ids.append(drawn[0].token_id)
        return True

    def take_back(self) -> None:
        """Leaves the sequence's constraint as it was before the guesses."""
        if self.own.constraint is not None:
            self.own.constraint.rollback(len(self.guesses))

    @property
    def guesses(self) -> list[int]:
        return self.own.token_ids[self.num_known :]


class ModelDrafter:
    """Drafts with any runner. Sequences it has no blocks for, or that it is far behind on, get no guesses for a while.

    Args:
        runner: of the draft model.
        config: block size, and how many tokens one call may compute.
        same_noise: draw with the target's own noise; False draws independently, as rejection sampling needs.
    """

    def __init__(self, runner: Runner, config: RuntimeConfig, *, same_noise: bool = True) -> None:
        self.runner = runner
        self.config = config
        self._noise = 0 if same_noise else OTHER_NOISE
        self._free = list(range(runner.num_blocks))
        self._shadows: dict[Sequence, _Shadow] = {}

    def propose(self, wishes: ListOf[Wish]) -> None:
        self._forget_all_but({sequence for sequence, _ in wishes})
        shadows = {sequence: self._shadow(sequence, count) for sequence, count in wishes if count}
        active = {shadow: count for (sequence, count) in wishes if (shadow := shadows.get(sequence)) is not None}
        drafting = list(active)
        try:
            while active:
                active = self._advance(active)
        finally:
            for shadow in drafting:
                shadow.take_back()
        for sequence, _ in wishes:
            shadow = shadows.get(sequence)
            sequence.draft_token_ids = shadow.guesses if shadow is not None else []

    def _advance(self, active: dict[_Shadow, int]) -> dict[_Shadow, int]:
        """One forward pass: a guess more for each sequence that is up to date. Returns those that want another."""
        entries: list[ScheduledSequence] = []
        budget = self.config.max_num_batched_tokens
        for shadow in active:
            own = shadow.own
            count = min(own.num_tokens - own.num_computed_tokens, self.config.prefill_chunk, budget)
            if count:
                entries.append(ScheduledSequence(own, own.num_computed_tokens, count))
                budget -= count
        tokens = self.runner.execute(StepPlan(tuple(entries))).tokens
        for entry in entries:
            entry.sequence.num_computed_tokens += entry.num_tokens
        guessed = {shadow: count for shadow, count in active.items() if shadow.take(tokens.get(shadow.own.id))}
        return {shadow: count for shadow, count in guessed.items() if len(shadow.guesses) < count}

    def _shadow(self, sequence: Sequence, count: int) -> _Shadow | None:
        """The sequence's shadow, up to date and with blocks for `count` guesses; None without room for them."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            request = sequence.request
            sampling = replace(request.sampling, logprobs=None, prompt_logprobs=None)
            shadow = _Shadow(Sequence(replace(request, sampling=sampling, seed=request.seed ^ self._noise), []))
        shadow.follow(sequence)
        # The last guess is never computed here.
        num_computed = sequence.num_tokens + count - 1
        missing = -(-num_computed // self.config.block_size) - len(shadow.own.block_ids)
        if missing > len(self._free) or num_computed > self.runner.max_model_len:
            return None
        shadow.own.block_ids += [self._free.pop() for _ in range(missing)]
        self._shadows[sequence] = shadow
        return shadow

    def _forget_all_but(self, sequences: set[Sequence]) -> None:
        for sequence in self._shadows.keys() - sequences:
            self._free += self._shadows.pop(sequence).own.block_ids


def skip_layers(target: Decoder, num_skipped: int | None = None) -> Decoder:
    """The target without some of its layers, spread evenly between the first and the last, which stay.

    A residual network's middle layers each change the hidden state a little, so what is left still predicts something
    (Zhang et al.: Draft & Verify, arXiv:2309.08168, section 3).

    Args:
        num_skipped: None leaves out half of them.

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
    windows = tuple(target.config.windows[index] for index in kept)
    config = replace(target.config, num_layers=len(kept), windows=windows)
    return replace(target, config=config, layers=[target.layers[index] for index in kept])


def round_layers(target: Decoder, path: str | Path, bits: int, kernels: str = "auto") -> Decoder:
    """The target with the linears of its layers rounded to `bits` bits: in asymmetric groups as small as fit, without
    calibration, in seconds. The checkpoint in folder `path` is read once more; nothing is written.

    Raises:
        ToolkitError: the weights are that small already.
    """
    source = PackedCheckpoint.open(path)
    modules = [module for module, _, _ in expected_linears(target.config, source) if module != HEAD]
    schemes = {module: _scheme(source, module, bits) for module in modules}
    layers, description = load_layers(RoundedCheckpoint.of(source, schemes), target, kernels)
    return replace(target, layers=layers, description=tuple(description))


def _scheme(source: PackedCheckpoint, module: str, bits: int) -> Scheme:
    stored, (rows, columns) = source.scheme(module), source.shape(module)
    if stored is not None and _taken(stored, rows, columns) <= bits:
        raise ToolkitError(
            f"{module} has {_taken(stored, rows, columns):g} bits already, so {bits} bits make no faster draft",
            "Use --speculative-model self:skip, ngram, or fewer bits",
        )
    return Scheme(bits, next((size for size in GROUP_SIZES if columns % size == 0), None), symmetric=False)


def _taken(stored: Scheme, rows: int, columns: int) -> float:
    """Bits of a weight. Factors of low rank are multiplied out for a draft, so what counts is what both take."""
    return stored.bits if stored.rank is None else stored.stored_bits(rows, columns) / (rows * columns)

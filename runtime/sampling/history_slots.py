"""Token histories of sequences for penalties and biases, and their changes since the last step. No torch."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.core.batch import SamplingMetadata
from runtime.core.logit_bias import LogitBias
from runtime.core.request import Sequence as LiveSequence

SEEN_IN_PROMPT, SEEN_IN_OUTPUT = 1, 2
"""Summands of a history entry: once for a token in the prompt, and for each occurrence in the output."""


@dataclass(slots=True)
class Changes:
    """Values to write to two tables `[slots, V]`, and the rows of both to clear first.

    Attributes:
        places, values: history entries, at index `slot * V + token id`.
        bias_places, biases: bias entries, likewise.
    """

    cleared: list[int] = field(default_factory=list)
    places: array[int] = field(default_factory=lambda: array("q"))
    values: array[int] = field(default_factory=lambda: array("q"))
    bias_places: array[int] = field(default_factory=lambda: array("q"))
    biases: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class _Slot:
    """Content of one row of the tables."""

    index: int
    prompt: Sequence[int] = ()
    in_prompt: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    bias: LogitBias | tuple[tuple[int, float], ...] = ()


class HistorySlots:
    """Rows of two tables with a column for each token id, one row for each sequence with penalties or a bias.

    A history entry is twice the count of the token in the output, plus one if the token occurs in the prompt and prompt
    tokens are penalized. A sequence keeps its row from step to step, so only added tokens are written.

    Args:
        num_slots: maximum number of sequences per step.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._free = list(range(num_slots))
        self._slots: OrderedDict[LiveSequence, _Slot] = OrderedDict()

    def follow(
        self, sequences: Sequence[LiveSequence], draws: Sequence[SamplingMetadata], changes: Changes
    ) -> list[int]:
        """Updates the rows of the sequences of a step; returns the row of each.

        Args:
            draws: sampling metadata of each sequence, before its draft.
            changes: receives the values to write.
        """
        for sequence in sequences:
            if sequence in self._slots:
                self._slots.move_to_end(sequence)
        return [self._follow(*each, changes) for each in zip(sequences, draws, strict=True)]

    def _follow(self, sequence: LiveSequence, draw: SamplingMetadata, changes: Changes) -> int:
        slot, changed = self._slots.get(sequence), set[int]()
        if slot is None or slot.prompt is not draw.prompt_token_ids or slot.bias is not draw.sampling.logit_bias:
            slot = self._begin(sequence, draw, changes)
            changed.update(slot.in_prompt)
        changed |= _replace_output(slot, list(draw.output_token_ids))
        changes.places.extend(slot.index * self.vocab_size + token for token in changed)
        changes.values.extend(
            SEEN_IN_OUTPUT * slot.counts[token] + SEEN_IN_PROMPT * (token in slot.in_prompt) for token in changed
        )
        return slot.index

    def _begin(self, sequence: LiveSequence, draw: SamplingMetadata, changes: Changes) -> _Slot:
        """Assigns a row to a sequence, its own or the least recently used one, and writes its prompt and bias."""
        known = self._slots.pop(sequence, None)
        index = known.index if known else self._free.pop() if self._free else self._slots.popitem(last=False)[1].index
        prompt, bias = draw.prompt_token_ids, draw.sampling.logit_bias
        slot = self._slots[sequence] = _Slot(index, prompt, frozenset(prompt), bias=bias)
        changes.cleared.append(index)
        if isinstance(bias, LogitBias):
            changes.bias_places.extend(index * self.vocab_size + token for token in bias.token_ids)
            changes.biases.extend(bias.values)
        return slot


def _replace_output(slot: _Slot, output: list[int]) -> set[int]:
    """Replaces the output of a row; returns the tokens with changed counts. Usually the output has grown; a draft model
    also removes tokens."""
    kept = len(slot.output)
    if slot.output != output[:kept]:
        kept = next(place for place, token in enumerate(slot.output) if output[place : place + 1] != [token])
    changed = {*slot.output[kept:], *output[kept:]}
    slot.counts.subtract(slot.output[kept:])
    slot.counts.update(output[kept:])
    slot.output[kept:] = output[kept:]
    return changed

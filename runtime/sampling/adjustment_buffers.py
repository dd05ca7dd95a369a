"""Buffers of logit biases, grammar masks and penalties for captured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.core.batch import SamplingMetadata, penalty_factors, to_device, upload, upload_columns
from runtime.core.step import ScheduledSequence
from runtime.sampling.history_slots import SEEN_IN_OUTPUT, Changes, HistorySlots
from runtime.sampling.logits_processors import packed_masks, penalize

WORD_BYTES = 4
NONE = -1
"""Placeholder for a missing mask or draft token."""
NUM_FACTORS = 3
"""Number of float64 columns per row: repetition, frequency and presence penalty."""


class AdjustmentBuffers:
    """Logits processing of captured steps, with the same results as `runtime.sampling.logits_processors`.

    Histories and biases of sequences stay on the device, and only added tokens are transferred; a token that the step
    before has sampled is counted before it is read. A mask is transferred
    as bits whenever it is used.

    Args:
        num_rows: rows of logits per step.
        num_sequences: sequences per step.
        num_drafts: maximum number of draft tokens per sequence.

    Attributes:
        scores: `[num_rows, V]`, the adjusted logits.
    """

    def __init__(
        self,
        num_rows: int,
        num_sequences: int,
        num_drafts: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_drafts = num_drafts
        self.scores = torch.zeros(num_rows, vocab_size, dtype=dtype, device=device)
        self._slots, self._no_slot = HistorySlots(num_sequences, vocab_size), num_sequences
        self._history = torch.zeros(num_sequences + 1, vocab_size, dtype=torch.int32, device=device)
        self._biases = torch.zeros(num_sequences + 1, vocab_size, dtype=dtype, device=device)
        self._num_words = -(-vocab_size // (8 * WORD_BYTES))
        self._masks = torch.zeros(num_rows, self._num_words, dtype=torch.int32, device=device)
        num_columns = 2 + num_drafts + NUM_FACTORS  # slot, place of the mask, drafted before the row, penalties
        self._columns = torch.zeros(num_columns, num_rows, dtype=torch.int64, device=device)

    def fill(
        self, entries: Sequence[ScheduledSequence], draws: Sequence[Sequence[SamplingMetadata]], rows_each: int
    ) -> None:
        """Transfers the inputs of a step.

        Args:
            draws: sampling metadata of each entry's rows, at most `rows_each` per entry.
        """
        slots = self._follow(entries, draws)
        masks: list[bytes] = []
        columns = np.full(self._columns.shape, NONE)
        columns[0], factors = self._no_slot, columns[-NUM_FACTORS:].view(np.float64)
        factors.T[:] = 1, 0, 0
        for index, group in enumerate(draws):
            for row, draw in enumerate(group, index * rows_each):
                if draw.mask is not None:
                    columns[1, row] = len(masks)
                    masks.append(draw.mask)
                if index in slots:
                    drafted = draw.output_token_ids[len(group[0].output_token_ids) :]
                    columns[0, row], columns[2 : 2 + len(drafted), row] = slots[index], drafted
                    factors[:, row] = penalty_factors(draw.sampling)
        self._columns.copy_(to_device(torch.from_numpy(columns), self._columns.device), non_blocking=True)
        if masks:
            words = torch.frombuffer(packed_masks(masks, self._num_words * WORD_BYTES), dtype=torch.int32)
            self._masks.view(-1)[: len(words)].copy_(to_device(words, self._masks.device), non_blocking=True)

    def adjust(self, logits: Tensor) -> Tensor:
        """Computes the first rows of `scores` from `logits [R, V]` of the filled rows. The kernel launches do not
        depend on the contents of the buffers."""
        rows = len(logits)
        slots, masks, *drafted = self._columns[:-NUM_FACTORS, :rows]
        factors = self._columns[-NUM_FACTORS:, :rows].view(torch.float64).to(logits.dtype).unsqueeze(-1)
        scores = torch.add(logits, self._biases.index_select(0, slots), out=self.scores[:rows])
        scores.masked_fill_(self._forbidden(masks), float("-inf"))
        history = self._history.index_select(0, slots)
        if drafted:
            tokens = torch.stack(drafted, 1)
            history.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).to(torch.int32) * SEEN_IN_OUTPUT)
        values = penalize(scores, (history // SEEN_IN_OUTPUT).to(logits.dtype), *factors)
        return torch.where(history > 0, values, scores, out=scores)

    def _forbidden(self, places: Tensor) -> Tensor:
        """Returns forbidden tokens, bool `[R, V]`, given mask indices; `NONE` allows all tokens."""
        bits = torch.arange(8 * WORD_BYTES, dtype=torch.int32, device=places.device)
        words = self._masks.index_select(0, places.clamp(min=0)).unsqueeze(-1)
        allowed = words.bitwise_right_shift(bits).bitwise_and_(1).flatten(1)[:, : self.scores.shape[-1]]
        return (allowed == 0) & (places >= 0).unsqueeze(-1)

    def _follow(
        self, entries: Sequence[ScheduledSequence], draws: Sequence[Sequence[SamplingMetadata]]
    ) -> dict[int, int]:
        """Updates histories and biases. Returns the slots of the entries that have one."""
        heads = {index: group[0] for index, group in enumerate(draws) if group[0].sampling.reads_history}
        changes = Changes()
        found = self._slots.follow([entries[index].sequence for index in heads], list(heads.values()), changes)
        device = self._history.device
        if changes.cleared:
            rows = upload(changes.cleared, device)
            self._history.index_fill_(0, rows, 0)
            self._biases.index_fill_(0, rows, 0)
        if changes.places:
            places, values = upload_columns((changes.places, changes.values), (), device)
            self._history.view(-1).index_copy_(0, places, values.to(self._history.dtype))
        if changes.bias_places:
            places, biases = upload_columns((changes.bias_places,), (changes.biases,), device)
            self._biases.view(-1).index_copy_(0, places, biases.to(self._biases.dtype))
        slots = dict(zip(heads, found, strict=True))
        self._count_unread({slots[index]: head.unread for index, head in heads.items() if head.unread is not None})
        return slots

    def _count_unread(self, tokens: dict[int, Tensor]) -> None:
        """Adds a token that only the device knows to each of some histories. When it is known, its number is written
        again, whatever it is here."""
        if not tokens:
            return
        last = torch.stack(list(tokens.values()))
        places = upload(tokens, last.device) * self._history.shape[-1] + last.clamp(min=0)
        self._history.view(-1).index_add_(0, places, (last >= 0).to(self._history.dtype) * SEEN_IN_OUTPUT)

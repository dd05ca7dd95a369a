"""What a request adds to the model's logits before temperature: bias, grammar mask, penalties, in this order.

All of it is elementwise within a row and depends on that row's request and history only. Every function overwrites
`scores [R, V]` for the rows that ask for it; what they need goes to the device as a few flat tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from runtime.draws import Draw
from runtime.upload import to_device, upload, upload_columns

MIN_REPETITION_PENALTY = 1e-10
"""Lower ones are as good as this, and what is divided by it stays finite."""


def adjust_logits(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits `[R, V]` as the requests want them; minus infinity where a mask forbids a token. Same dtype.

    `logits` stays as it is, because log-probabilities are of the unmodified distribution; it is returned itself when
    nobody wants a change.
    """
    biased = [row for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    masked = [row for row, draw in enumerate(draws) if draw.mask is not None]
    penalized = [row for row, draw in enumerate(draws) if draw.sampling.has_penalties]
    if not (biased or masked or penalized):
        return logits
    scores = logits.clone()
    if biased:
        _add_bias(scores, biased, draws)
    if masked:
        _forbid(scores, masked, draws)
    if penalized:
        _penalize(scores, penalized, draws)
    return scores


def _add_bias(scores: Tensor, rows: list[int], draws: Sequence[Draw]) -> None:
    pairs = [(row, *pair) for row in rows for pair in draws[row].sampling.logit_bias]
    places = [row * scores.shape[-1] + token_id for row, token_id, _ in pairs]
    index, bias = upload_columns((places,), ([bias for *_, bias in pairs],), scores.device)
    scores.view(-1).index_add_(0, index, bias.to(scores.dtype))


def _forbid(scores: Tensor, rows: list[int], draws: Sequence[Draw]) -> None:
    vocab_size = scores.shape[-1]
    num_bytes = (vocab_size + 7) // 8
    # The model's table may be padded beyond the ids a mask knows: those cannot be said.
    packed = b"".join((draws[row].mask or b"")[:num_bytes].ljust(num_bytes, b"\0") for row in rows)
    octets = to_device(torch.frombuffer(bytearray(packed), dtype=torch.uint8), scores.device)
    octets = octets.view(len(rows), num_bytes, 1)
    bits = octets.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=scores.device)).bitwise_and_(1)
    forbidden = bits.view(len(rows), -1)[:, :vocab_size] == 0
    if len(rows) == len(scores):
        scores.masked_fill_(forbidden, float("-inf"))
    else:
        index = upload(rows, scores.device)
        scores.index_copy_(0, index, scores.index_select(0, index).masked_fill_(forbidden, float("-inf")))


def _penalize(scores: Tensor, rows: list[int], draws: Sequence[Draw]) -> None:
    """Changes the logits of tokens in the history; the rest of the vocabulary is not touched."""
    seen, counts = _count_tokens(scores, rows, draws)
    row_of = seen // scores.shape[-1]
    params = [draw.sampling for draw in draws]
    columns = (
        [max(p.repetition_penalty, MIN_REPETITION_PENALTY) for p in params],
        [p.frequency_penalty for p in params],
        [p.presence_penalty for p in params],
    )
    repetition, frequency, presence = (
        column.to(scores.dtype).index_select(0, row_of) for column in upload_columns((), columns, scores.device)
    )
    values = scores.view(-1).index_select(0, seen)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * frequency
    values -= (counts > 0) * presence
    scores.view(-1).index_copy_(0, seen, values)


def _count_tokens(scores: Tensor, rows: list[int], draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Where in the flat scores a token of the history stands, each place once, and how often it is in the output."""
    vocab_size = scores.shape[-1]
    histories = [history for row in rows for history in (draws[row].prompt_token_ids, draws[row].output_token_ids)]
    lengths = upload(map(len, histories), scores.device)
    starts = upload((row * vocab_size for row in rows), scores.device).repeat_interleave(2)
    is_output = upload([0, 1] * len(rows), scores.device)
    places = upload(chain.from_iterable(histories), scores.device)
    places += starts.repeat_interleave(lengths, output_size=len(places))
    seen, inverse = places.unique(return_inverse=True)
    counts = torch.zeros_like(seen)
    counts.index_add_(0, inverse, is_output.repeat_interleave(lengths, output_size=len(places)))
    return seen, counts.to(scores.dtype)

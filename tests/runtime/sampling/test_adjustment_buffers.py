"""Buffers of captured steps hold what requests want: the same bits as adjusted logits, whatever was in them before."""

import random

import pytest
import torch
from covering import sample
from exact_sampling import pack_mask
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.backends.backend import UNDECIDED
from runtime.core.batch import SamplingMetadata, build_sampling_metadata, upload_columns
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import KNOWN, ScheduledSequence
from runtime.memory.estimate import ADJUSTED_LOGIT_BYTES, HISTORY_BYTES
from runtime.sampling.adjustment_buffers import AdjustmentBuffers
from runtime.sampling.logits_processors import adjust_logits

VOCAB, ROWS, SEQUENCES, DRAFTS = 75, 12, 4, 3
WISHES = (
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3},
    {"logit_bias": ((5, 2.5), (74, -100.0))},
    {"logit_bias": ((0, -1.5),), "repetition_penalty": 0.6, "frequency_penalty": 0.2},
)


class Allows:
    """A constraint whose masks depend on the number of tokens; some are longer or shorter than the vocabulary."""

    def __init__(self, length: int) -> None:
        self.length, self.said = length, 0

    def mask(self) -> bytes:
        return pack_mask(range(self.said % 5, self.length, 1 + self.said % 3), self.length)

    def accept(self, token_ids: list[int]) -> int:
        self.said += len(token_ids)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.said -= num_tokens


def buffers(dtype: torch.dtype, num_drafts: int = DRAFTS) -> AdjustmentBuffers:
    return AdjustmentBuffers(ROWS, SEQUENCES, num_drafts, VOCAB, dtype, torch.device("cpu"))


def begin(chance: random.Random, number: int) -> Sequence:
    prompt = tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 30)))
    request = Request(str(number), prompt, SamplingParams(**WISHES[number % len(WISHES)]), seed=1)
    constraint = Allows(chance.choice((40, 75, 128))) if chance.random() < 0.3 else None
    return Sequence(request, list(prompt), constraint=constraint)


def check(
    adjustments: AdjustmentBuffers, entries: list[ScheduledSequence], logits: torch.Tensor, rows_each: int
) -> None:
    """Rows of the entries have the bits of adjusted logits, those of padding are left as they are."""
    draws = list(map(build_sampling_metadata, entries))
    adjustments.fill(entries, draws, rows_each)
    found = adjustments.adjust(logits)
    nothing = SamplingMetadata(SamplingParams(), 0, 0)
    padded = [[*group, *[nothing] * (rows_each - len(group))] for group in draws]
    flat = [draw for group in padded for draw in group]
    flat += [nothing] * (len(logits) - len(flat))
    assert torch.equal(found, adjust_logits(logits, flat))


@pytest.mark.parametrize("dtype", sample([torch.float32, torch.float64]), ids=str)
@examples(60)
@given(seed=st.integers(0, 2**31))
def test_scores_have_the_bits_of_adjusted_logits(dtype, seed) -> None:
    """Sequences come and go, grow, draft, and have tokens taken back; more of them than there are slots."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    adjustments, known = buffers(dtype), [begin(chance, number) for number in range(9)]
    for step in range(12):
        known[chance.randrange(9)] = begin(chance, step)
        chosen = chance.sample(known, chance.randint(1, SEQUENCES))
        for sequence in chosen:
            if sequence.num_output_tokens and chance.random() < 0.2:
                del sequence.token_ids[-chance.randint(1, sequence.num_output_tokens) :]
            sequence.token_ids += [chance.randrange(VOCAB) for _ in range(chance.randint(0, 4))]
            sequence.draft_token_ids = [chance.randrange(VOCAB) for _ in range(chance.randint(0, 2))]
        entries = [ScheduledSequence(s, s.num_tokens - 1, 1 + len(s.draft_token_ids)) for s in chosen]
        check(adjustments, entries, 3 * torch.randn(ROWS, VOCAB, generator=generator, dtype=dtype), 3)


@examples(40)
@given(seed=st.integers(0, 2**31))
def test_a_token_that_is_not_read_yet_is_counted(seed) -> None:
    """As if it were known, in captured and in eager steps; one that was not decided counts for nothing."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    adjustments, sequences = buffers(torch.float32), [begin(chance, number) for number in range(5)]
    for sequence in sequences:
        sequence.constraint = None
    for _ in range(10):
        chosen = [s for s in chance.sample(sequences, SEQUENCES) if s.num_output_tokens or chance.random() < 0.9]
        tokens = {s.id: chance.choice((3, 5, UNDECIDED)) if s.num_output_tokens else None for s in chosen}
        entries = [ScheduledSequence(s, s.num_tokens - (tokens[s.id] is None), 1) for s in chosen]
        draws = []
        for entry in entries:
            token = tokens[entry.sequence.id]
            entry.source_row = KNOWN if token is None else 0
            draws.append(build_sampling_metadata(entry, None if token is None else torch.tensor(token)))
        logits = 3 * torch.randn(len(entries), VOCAB, generator=generator)
        adjustments.fill(entries, draws, 1)
        found, eager = adjustments.adjust(logits).clone(), adjust_logits(logits, [draw for (draw,) in draws])
        for sequence in chosen:
            sequence.token_ids += [token for token in [tokens[sequence.id]] if token is not None and token >= 0]
        decided = [row for row, s in enumerate(chosen) if tokens[s.id] is None or tokens[s.id] >= 0]
        known = [ScheduledSequence(s, s.num_tokens - 1, 1) for s in chosen]
        expected = adjust_logits(logits, [draw for entry in known for draw in build_sampling_metadata(entry)])
        assert torch.equal(found[decided], expected[decided])
        assert torch.equal(eager[decided], expected[decided])
        for sequence in chosen:
            sequence.token_ids += [chance.randrange(VOCAB)] * (tokens[sequence.id] in (None, UNDECIDED))


def test_a_tree_of_drafts_is_counted_branch_by_branch() -> None:
    sequence = Sequence(Request("r", (1, 2), SamplingParams(frequency_penalty=0.5), seed=1), [1, 2, 7])
    sequence.draft_token_ids, sequence.draft_parents = [7, 7, 9], [-1, 0, -1]
    check(buffers(torch.float32), [ScheduledSequence(sequence, 2, 4)], torch.randn(ROWS, VOCAB), 4)


def test_only_what_has_changed_is_sent(monkeypatch) -> None:
    """Sends one token per step of a long history."""
    sent: list[int] = []
    upload = "runtime.sampling.adjustment_buffers.upload_columns"

    monkeypatch.setattr(
        upload, lambda integers, *rest: sent.append(len(integers[0])) or upload_columns(integers, *rest)
    )
    params = SamplingParams(repetition_penalty=1.3, logit_bias=((3, 1.0),))
    sequence = Sequence(Request("r", tuple(range(60)), params, seed=1), list(range(60)))
    adjustments = buffers(torch.float32)
    for token in (5, 61, 5):
        sequence.token_ids.append(token)
        check(adjustments, [ScheduledSequence(sequence, sequence.num_tokens - 1, 1)], torch.randn(1, VOCAB), 1)
    assert sent == [60, 1, 1, 1]


def test_what_stays_allocated_is_estimated() -> None:
    held = sum(tensor.nbytes for tensor in vars(buffers(torch.float32)).values() if isinstance(tensor, torch.Tensor))
    small = ROWS * (2 + DRAFTS + 3) * 8 + ROWS * 4 * -(-VOCAB // 32)  # numbers of rows, and masks
    assert held - small == (ROWS * ADJUSTED_LOGIT_BYTES + (SEQUENCES + 1) * HISTORY_BYTES) * VOCAB

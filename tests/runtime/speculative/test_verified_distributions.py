"""Both ways to verify draw exactly from the target's distribution: chi-square tests against the exact one."""

import math

import pytest
import torch
from covering import covering

from runtime.core.batch import SamplingMetadata
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import SampledToken, ScheduledSequence
from runtime.runner.runner import sample_and_match
from runtime.sampling.sampler import probabilities
from runtime.speculative.draft_model import OTHER_NOISE
from runtime.speculative.verify import Proposals, ProposalSampler, RejectionSampler

VOCAB = 7
NUM_GUESSES = 3
NUM_SEEDS = 4000


def make_logits(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGET = make_logits(0, NUM_GUESSES + 1)
"""Probabilities of the target at each position, independent of earlier tokens."""
DRAFTERS = {
    "close": TARGET + 0.5 * make_logits(1, NUM_GUESSES + 1),
    "far": make_logits(2, NUM_GUESSES + 1),
    "same": TARGET,
}
SAMPLINGS = {
    "plain": SamplingParams(temperature=1.0),
    "warm and truncated": SamplingParams(temperature=1.4, top_p=0.85, top_k=5),
}


def new_sequence(seed: int, sampling: SamplingParams) -> Sequence:
    return Sequence(Request(str(seed), (1, 2), sampling, seed), [1, 2])


def draft(sequences: list[Sequence], logits: torch.Tensor, mode: str, proposals: Proposals) -> None:
    """Guesses as the draft model makes them: with the target's noise, or with its own and what it draws from."""
    noise = OTHER_NOISE if mode == "reject" else 0
    shadows = [Sequence(Request(s.id, (1, 2), s.request.sampling, s.request.seed ^ noise), [1, 2]) for s in sequences]
    sample = ProposalSampler(proposals) if mode == "reject" else sample_and_match
    for position in range(NUM_GUESSES):
        entries = [ScheduledSequence(shadow, shadow.num_tokens - 1, 1) for shadow in shadows]
        drawn = sample(entries, logits[position].repeat(len(entries), 1))
        for shadow in shadows:
            shadow.token_ids.append(drawn[shadow.id][0].token_id)
    for sequence, shadow in zip(sequences, shadows, strict=True):
        sequence.draft_token_ids = shadow.token_ids[2:]


def verify(sequences: list[Sequence], mode: str, proposals: Proposals) -> dict[str, list[SampledToken]]:
    entries = [ScheduledSequence(s, s.num_tokens - 1, 1 + len(s.draft_token_ids)) for s in sequences]
    sample = RejectionSampler(proposals) if mode == "reject" else sample_and_match
    rows = torch.cat([TARGET[: entry.num_tokens] for entry in entries])
    return sample(entries, rows)


def generate(mode: str, drafter: str, sampling: SamplingParams, seeds: range) -> list[list[int]]:
    """The tokens that one step gives, for each seed."""
    proposals: Proposals = {}
    sequences = [new_sequence(seed, sampling) for seed in seeds]
    if drafter == "fixed":
        for sequence in sequences:
            sequence.draft_token_ids = TARGET[:3].argsort(-1, descending=True)[:, 1].tolist()
    else:
        draft(sequences, DRAFTERS[drafter], mode, proposals)
    # A step may verify its sequences in two parts.
    parts = (sequences[::2], sequences[1::2])
    tokens = {name: found for part in parts if part for name, found in verify(part, mode, proposals).items()}
    return [[token.token_id for token in tokens[sequence.id]] for sequence in sequences]


def chi_square(counts: torch.Tensor, shares: torch.Tensor) -> float:
    """In standard deviations above what chance gives, by Wilson and Hilferty's cube root."""
    possible = shares > 0
    assert not counts[~possible].any(), "a token that cannot be drawn was drawn"
    expected = shares[possible] * counts.sum()
    freedom = int(possible.sum()) - 1
    statistic = float(((counts[possible] - expected).square() / expected).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize(
    ("mode", "drafter", "form"), covering(["match", "reject"], ["close", "far", "same", "fixed"], list(SAMPLINGS))
)
def test_every_position_has_the_targets_distribution(mode: str, drafter: str, form: str) -> None:
    sampling = SAMPLINGS[form]
    answers = generate(mode, drafter, sampling, range(NUM_SEEDS))
    exact = probabilities(TARGET, [SamplingMetadata(sampling, 0, 0)] * len(TARGET))
    for position in range(NUM_GUESSES + 1):
        reached = [tokens[position] for tokens in answers if len(tokens) > position]
        if len(reached) > 200:
            counts = torch.bincount(torch.tensor(reached), minlength=VOCAB).double()
            assert chi_square(counts, exact[position]) < 4, f"position {position}"
    assert max(map(len, answers)) > 1


def test_what_was_accepted_before_changes_nothing() -> None:
    """The pair of the first two tokens has the product distribution, given that there are two."""
    answers = [
        tokens for tokens in generate("reject", "close", SAMPLINGS["plain"], range(NUM_SEEDS)) if len(tokens) > 1
    ]
    exact = probabilities(TARGET, [SamplingMetadata(SAMPLINGS["plain"], 0, 0)] * len(TARGET))
    firsts = torch.tensor([tokens[0] for tokens in answers])
    seconds = torch.tensor([tokens[1] for tokens in answers])
    for first in range(VOCAB):
        counts = torch.bincount(seconds[firsts == first], minlength=VOCAB).double()
        if counts.sum() > 100:
            assert chi_square(counts, exact[1]) < 4


@pytest.mark.parametrize("mode", ["match", "reject"])
def test_a_seed_gives_the_same_tokens_again(mode: str) -> None:
    first = generate(mode, "close", SAMPLINGS["plain"], range(50))
    alone = [generate(mode, "close", SAMPLINGS["plain"], range(seed, seed + 1))[0] for seed in range(50)]
    assert first == alone
    assert len(set(map(tuple, first))) > 20


def test_match_gives_the_tokens_of_no_guesses() -> None:
    for seed, tokens in enumerate(generate("match", "far", SAMPLINGS["plain"], range(200))):
        sequence, plain = new_sequence(seed, SAMPLINGS["plain"]), []
        for position in range(len(tokens)):
            entry = ScheduledSequence(sequence, sequence.num_tokens - 1, 1)
            plain.append(sample_and_match([entry], TARGET[position : position + 1])[sequence.id][0].token_id)
            sequence.token_ids.append(plain[-1])
        assert tokens == plain


def acceptance(mode: str, drafter: str) -> float:
    """Share of first guesses that hold."""
    return sum(len(tokens) > 1 for tokens in generate(mode, drafter, SAMPLINGS["plain"], range(3000))) / 3000


@pytest.mark.full
def test_rejection_accepts_as_much_as_the_distributions_overlap_and_match_nearly_so() -> None:
    p, q = TARGET[0].softmax(-1), DRAFTERS["close"][0].softmax(-1)
    overlap = float(torch.minimum(p, q).sum())
    assert acceptance("reject", "close") == pytest.approx(overlap, abs=0.03)
    assert overlap - 0.12 < acceptance("match", "close") < overlap + 0.03
    assert acceptance("match", "same") == acceptance("reject", "same") == 1.0


def test_greedy_is_greedy_by_rejection_too() -> None:
    greedy = SamplingParams(temperature=0)
    best = TARGET.argmax(-1).tolist()
    for guesses in (best[:3], [best[0], (best[1] + 1) % VOCAB, best[2]], []):
        sequence = new_sequence(1, greedy)
        sequence.draft_token_ids = list(guesses)
        tokens = [token.token_id for token in verify([sequence], "reject", {})["1"]]
        assert tokens == best[: len(tokens)]
        assert len(tokens) == (4 if guesses == best[:3] else 2 if guesses else 1)


def test_rows_that_are_not_finite_end_the_answer_where_they_stand() -> None:
    logits = TARGET.clone()
    logits[1] = float("nan")
    for sample in (RejectionSampler({}), sample_and_match):
        sequence = new_sequence(3, SamplingParams(temperature=0, logprobs=1))
        sequence.draft_token_ids = [int(TARGET[0].argmax()), 1, 1]
        tokens = sample([ScheduledSequence(sequence, 1, 4)], logits)["3"]
        assert [bool(token.error) for token in tokens] == [False, True]
        assert tokens[0].logprobs.top[0][0] == tokens[0].token_id

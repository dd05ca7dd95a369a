"""Which guesses hold, by match: the target draws its own tokens, and those that agree with the draft are kept.

Each row of a span draws from the distribution that the target gives after the tokens and guesses before it, with the
noise of its own position: where the draft is a tree, of the position that its branch gives it. A draw counts only
while all guesses before it were drawn too, so every token that is kept is exactly the one that would have been drawn
without a draft; the draft only decides how many are drawn in one step.
No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from runtime.core.sampling_metadata import SamplingMetadata, build_sampling_metadata
from runtime.core.sampling_tensors import gumbel_noise
from runtime.core.step import SampledToken, ScheduledSequence, find_child
from runtime.sampling.sampler import probabilities, sample_tokens, token_logprobs


def verify_by_match(
    entries: Iterable[ScheduledSequence], drawn: Iterable[SampledToken]
) -> dict[str, list[SampledToken]]:
    """Tokens by sequence id: the draws that equal a branch of the draft, and the first one that does not or follows it.

    Args:
        entries: that sample.
        drawn: `1 + num_draft_tokens` for each entry, in order.
    """
    rest = iter(drawn)
    return {entry.sequence.id: _agreed(entry, list(islice(rest, 1 + entry.num_draft_tokens))) for entry in entries}


def _agreed(entry: ScheduledSequence, drawn: list[SampledToken]) -> list[SampledToken]:
    parents = entry.draft_parents
    draft = entry.sequence.draft_token_ids[: len(parents)]
    said, guess = drawn[:1], find_child(draft, parents, -1, drawn[0].token_id)
    while guess is not None:
        said.append(drawn[guess + 1])
        guess = find_child(draft, parents, guess, said[-1].token_id)
    return said


ACCEPTANCE_NOISE = 0x2545F4914F6CDD1D
"""Changes a seed into the one whose noise decides about acceptance."""

Proposals = dict[tuple[str, int], Tensor]
"""Distributions `q [V]` that guesses were drawn from, by sequence id and position, for one step."""


class ProposalSampler:
    """Draws a draft model's guesses and keeps the distributions they come from."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def __call__(
        self, entries: Sequence[ScheduledSequence], logits: Tensor, drawn: Tensor | None = None
    ) -> dict[str, list[SampledToken]]:
        draws = [build_sampling_metadata(entry)[0] for entry in entries]
        for entry, draw, row in zip(entries, draws, probabilities(logits, draws), strict=True):
            self._proposals[entry.sequence.id, draw.position] = row
        tokens = sample_tokens(logits, draws, drawn)
        return {entry.sequence.id: [token] for entry, token in zip(entries, tokens, strict=True)}


class RejectionSampler:
    """Draws what follows each sequence and verifies its draft by rejection.

    Args:
        proposals: of the guesses to verify; emptied by each call.
    """

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def __call__(
        self, entries: Sequence[ScheduledSequence], logits: Tensor, drawn: Tensor | None = None
    ) -> dict[str, list[SampledToken]]:
        """Tokens by sequence id, of `1 + num_draft_tokens` rows of logits `[R, V]` per entry, in order."""
        draws = [build_sampling_metadata(entry) for entry in entries]
        flat = [draw for group in draws for draw in group]
        own, first, tokens = sample_tokens(logits, flat, drawn), 0, {}
        guesses = list(_guesses(entries, draws))
        verdicts = self._judge(guesses, logits, flat) if guesses else {}
        self._proposals.clear()
        for entry, group in zip(entries, draws, strict=True):
            rows = range(first, first + len(group))
            tokens[entry.sequence.id] = _until_refused(rows, own, verdicts)
            first = rows.stop
        return tokens

    def _judge(
        self, guesses: list[_Guess], logits: Tensor, draws: list[SamplingMetadata]
    ) -> dict[int, tuple[bool, SampledToken]]:
        """By row: whether its guess is accepted, and the token that stands there then."""
        rows = [guess.row for guess in guesses]
        mine = [draws[row] for row in rows]
        logits = logits[rows]
        p = probabilities(logits, mine)
        q = self._proposed(guesses, mine, p)
        token_ids = torch.tensor([guess.token_id for guess in guesses], device=p.device).unsqueeze(-1)
        limit = _uniform(mine).to(p.device) * q.gather(-1, token_ids).squeeze(-1)
        accepted = limit < p.gather(-1, token_ids).squeeze(-1)
        chosen = torch.where(accepted, token_ids.squeeze(-1), _draw_rest(p, q, mine)).tolist()
        tokens = [_token(row, token_id, draw) for row, token_id, draw in zip(logits, chosen, mine, strict=True)]
        return dict(zip(rows, zip(accepted.tolist(), tokens, strict=True), strict=True))

    def _proposed(self, guesses: list[_Guess], draws: list[SamplingMetadata], p: Tensor) -> Tensor:
        """What the guesses were drawn from `[D, V]`; all on the guess itself where nobody knows."""
        q = torch.zeros_like(p)
        for row, (guess, draw) in enumerate(zip(guesses, draws, strict=True)):
            known = self._proposals.get((guess.sequence_id, draw.position))
            if known is None:
                q[row, guess.token_id] = 1.0
            else:
                q[row] = known
        return q


@dataclass(frozen=True, slots=True)
class _Guess:
    """A draft token, and the row of logits that judges it."""

    row: int
    sequence_id: str
    token_id: int


def _guesses(entries: Sequence[ScheduledSequence], draws: Sequence[Sequence[SamplingMetadata]]) -> Iterator[_Guess]:
    """All draft tokens. The last row of an entry judges none: it stands behind them."""
    first = 0
    for entry, group in zip(entries, draws, strict=True):
        for index in range(len(group) - 1):
            yield _Guess(first + index, entry.sequence.id, entry.sequence.draft_token_ids[index])
        first += len(group)


def _until_refused(
    rows: range, drawn: Sequence[SampledToken], verdicts: Mapping[int, tuple[bool, SampledToken]]
) -> list[SampledToken]:
    """The accepted guesses of one entry and the token behind them, or what stands in place of the first refused one."""
    tokens: list[SampledToken] = []
    for row in rows[:-1]:
        accepted, token = verdicts[row]
        if drawn[row].error:
            return [*tokens, drawn[row]]
        tokens.append(token)
        if not accepted:
            return tokens
    return [*tokens, drawn[rows[-1]]]


def _uniform(draws: Sequence[SamplingMetadata]) -> Tensor:
    """Between 0 and 1 `[D]`, independent of the noise that tokens are drawn with."""
    return (-(-_noise([draw.seed ^ ACCEPTANCE_NOISE for draw in draws], draws, 1)[:, 0]).exp()).exp()


def _draw_rest(p: Tensor, q: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
    """Tokens `[D]` from `(p - q)+`, normalized; from `p` where rounding refused a sure guess and leaves nothing."""
    rest = (p - q).clamp_(min=0)
    rest = torch.where(rest.any(-1, keepdim=True), rest, p)
    noise = _noise([draw.seed for draw in draws], draws, p.shape[-1])
    return (rest.log() + noise.to(p.device)).argmax(-1)


def _noise(seeds: list[int], draws: Sequence[SamplingMetadata], count: int) -> Tensor:
    return gumbel_noise(torch.tensor(seeds), torch.tensor([draw.position for draw in draws]), torch.arange(count))


def _token(logits: Tensor, token_id: int, draw: SamplingMetadata) -> SampledToken:
    wanted = draw.sampling.logprobs
    if wanted is None:
        return SampledToken(token_id)
    return SampledToken(token_id, token_logprobs(logits.unsqueeze(0), [token_id], wanted)[0])

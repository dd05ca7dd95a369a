"""Verification of draft tokens, in two ways that keep the output distribution exact.

Exact match: the target samples its own token in every row of a span, from its distribution after the tokens and draft
tokens before that row and with the noise of that position (in a tree: the position on its branch). A sampled token
counts as long as all draft tokens before it were sampled too. So every kept token is the one that would have been
sampled without a draft, and the draft only decides how many tokens a step yields.

Rejection sampling, for drafters with independent noise: a draft token `x ~ q` is accepted with probability
`min(1, p(x) / q(x))`; otherwise the token is sampled from `(p - q)+`. Together they sample from the target's
distribution `p` (Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding,
arXiv:2211.17192, section 2.3 and appendix A.1). `p` and `q` are the distributions after bias, mask, penalties,
temperature and truncation. Draft tokens without a known `q` (n-grams, greedy drafts) have `q(x) = 1`. A seed reproduces
its tokens only if the same tokens are drafted, a limit that exact match does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from runtime.backends.torch.ops import gumbel_noise
from runtime.core.batch import SamplingMetadata, build_sampling_metadata
from runtime.core.draft_tree import find_child
from runtime.core.step import SampledToken, ScheduledSequence
from runtime.sampling.sampler import Drawn, choose_sampler, probabilities, sample_tokens


def verify_by_match(
    entries: Iterable[ScheduledSequence], drawn: Iterable[SampledToken]
) -> dict[str, list[SampledToken]]:
    """Keeps the sampled tokens that follow a branch of the draft, and the one after them; by sequence id.

    Args:
        entries: entries that sample.
        drawn: `1 + num_draft_tokens` sampled tokens of each entry, in order.
    """
    rest = iter(drawn)
    return {entry.sequence.id: _agreed(entry, list(islice(rest, 1 + entry.num_draft_tokens))) for entry in entries}


def _agreed(entry: ScheduledSequence, drawn: list[SampledToken]) -> list[SampledToken]:
    parents = entry.draft_parents
    draft = entry.sequence.draft_token_ids[: len(parents)]
    accepted, child = drawn[:1], find_child(draft, parents, -1, drawn[0].token_id)
    while child is not None:
        accepted.append(drawn[child + 1])
        child = find_child(draft, parents, child, accepted[-1].token_id)
    return accepted


ACCEPTANCE_NOISE = 0x2545F4914F6CDD1D
"""Mixed into a seed to get the noise that decides about acceptance."""

Proposals = dict[tuple[str, int], Tensor]
"""Distributions `q [V]` that draft tokens were sampled from, by sequence id and position, for one step. They are
dropped when the next drafts are made: a step may verify its sequences in several parts."""


class ProposalSampler:
    """Samples a draft model's tokens and keeps their distributions."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def __call__(
        self, entries: Sequence[ScheduledSequence], logits: Tensor, drawn: Drawn | None = None
    ) -> dict[str, list[SampledToken]]:
        draws = [group[0] for group in _groups(entries, drawn)]
        for entry, draw, row in zip(entries, draws, probabilities(logits, draws), strict=True):
            self._proposals[entry.sequence.id, draw.position] = row
        tokens = sample_tokens(logits, draws, None if drawn is None else drawn.tokens)
        return {entry.sequence.id: [token] for entry, token in zip(entries, tokens, strict=True)}


def _groups(entries: Sequence[ScheduledSequence], drawn: Drawn | None) -> list[list[SamplingMetadata]]:
    """Returns how the rows of each entry are drawn."""
    return list(map(build_sampling_metadata, entries)) if drawn is None else drawn.draws


class RejectionSampler:
    """Samples the next tokens of each sequence and verifies its draft by rejection sampling.

    Args:
        proposals: distributions of the draft tokens of this step.
    """

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def __call__(
        self, entries: Sequence[ScheduledSequence], logits: Tensor, drawn: Drawn | None = None
    ) -> dict[str, list[SampledToken]]:
        """Returns tokens by sequence id, from `1 + num_draft_tokens` rows of logits `[R, V]` per entry, in order."""
        draws = _groups(entries, drawn)
        flat = [draw for group in draws for draw in group]
        own = sample_tokens(logits, flat, None if drawn is None else drawn.tokens)
        first, tokens = 0, {}
        drafted = list(_draft_tokens(entries, draws))
        verdicts = self._judge(drafted, logits, flat) if drafted else {}
        for entry, group in zip(entries, draws, strict=True):
            rows = range(first, first + len(group))
            tokens[entry.sequence.id] = _until_rejected(rows, own, verdicts)
            first = rows.stop
        return tokens

    def _judge(
        self, drafted: list[_DraftToken], logits: Tensor, draws: list[SamplingMetadata]
    ) -> dict[int, tuple[bool, SampledToken]]:
        """Returns by row whether its draft token is accepted, and the resulting token."""
        rows = [each.row for each in drafted]
        mine = [draws[row] for row in rows]
        logits = logits[rows]
        p = probabilities(logits, mine)
        q = self._proposed(drafted, mine, p)
        token_ids = torch.tensor([each.token_id for each in drafted], device=p.device).unsqueeze(-1)
        limit = _uniform(mine).to(p.device) * q.gather(-1, token_ids).squeeze(-1)
        accepted = limit < p.gather(-1, token_ids).squeeze(-1)
        chosen = torch.where(accepted, token_ids.squeeze(-1), _draw_rest(p, q, mine)).tolist()
        tokens = [_token(row, token_id, draw) for row, token_id, draw in zip(logits, chosen, mine, strict=True)]
        return dict(zip(rows, zip(accepted.tolist(), tokens, strict=True), strict=True))

    def _proposed(self, drafted: list[_DraftToken], draws: list[SamplingMetadata], p: Tensor) -> Tensor:
        """Returns the distributions of the draft tokens `[D, V]`; one-hot where unknown."""
        q = torch.zeros_like(p)
        for row, (each, draw) in enumerate(zip(drafted, draws, strict=True)):
            known = self._proposals.get((each.sequence_id, draw.position))
            if known is None:
                q[row, each.token_id] = 1.0
            else:
                q[row] = known
        return q


@dataclass(frozen=True, slots=True)
class _DraftToken:
    """A draft token, and the row of logits that verifies it."""

    row: int
    sequence_id: str
    token_id: int


def _draft_tokens(
    entries: Sequence[ScheduledSequence], draws: Sequence[Sequence[SamplingMetadata]]
) -> Iterator[_DraftToken]:
    """Yields all draft tokens. The last row of an entry verifies none: it follows them."""
    first = 0
    for entry, group in zip(entries, draws, strict=True):
        for index in range(len(group) - 1):
            yield _DraftToken(first + index, entry.sequence.id, entry.sequence.draft_token_ids[index])
        first += len(group)


def _until_rejected(
    rows: range, drawn: Sequence[SampledToken], verdicts: Mapping[int, tuple[bool, SampledToken]]
) -> list[SampledToken]:
    """Returns the accepted draft tokens of one entry, and the token after them or in place of the first rejected
    one."""
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
    """Returns uniform numbers `[D]` between 0 and 1, independent of the noise of sampling."""
    return (-(-_noise([draw.seed ^ ACCEPTANCE_NOISE for draw in draws], draws, 1)[:, 0]).exp()).exp()


def _draw_rest(p: Tensor, q: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
    """Samples tokens `[D]` from normalized `(p - q)+`; from `p` where rounding leaves nothing of it."""
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
    sampler = choose_sampler(logits.device, logits.dtype)
    return SampledToken(token_id, sampler.token_logprobs(logits.unsqueeze(0), [token_id], wanted)[0])

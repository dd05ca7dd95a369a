"""What the sampler must know of each row of logits: one row per sequence, and one more per draft token. No torch."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from runtime.core.request import Constraint, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, paths


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How one row is drawn: a function of its sequence alone, so its token is the same whatever else is in the batch.

    Attributes:
        position: the one that the new token will have in its sequence.
        prompt_token_ids, output_token_ids: the tokens before it, as far as penalties want to know them.
        mask: one bit per token id, lowest bit of the first byte first; only tokens whose bit is set can be drawn. None
            allows all.
    """

    sampling: SamplingParams
    seed: int
    position: int
    prompt_token_ids: TokenIds[int] = ()
    output_token_ids: TokenIds[int] = ()
    mask: bytes | None = None


def build_sampling_metadata(entry: ScheduledSequence) -> list[SamplingMetadata]:
    """Draws of the rows `num_tokens - 1` to `num_tokens - 1 + num_draft_tokens` of an entry that samples.

    Draw `i` takes draft token `i - 1` and those before it, its ancestors in a tree, as said: they are in its history
    and its constraint has accepted them. The constraint comes back as it was; a sequence that has one has no tree.
    """
    sequence = entry.sequence
    draft = sequence.draft_token_ids[: entry.num_draft_tokens]
    masks = _masks(sequence.constraint, draft)
    said = [[], *([draft[number] for number in path] for path in paths(entry.draft_parents))]
    return [_draw(sequence, before, mask) for before, mask in zip(said, masks, strict=True)]


def _draw(sequence: Sequence, said: list[int], mask: bytes | None) -> SamplingMetadata:
    request, sampling = sequence.request, sequence.request.sampling
    prompt = request.prompt_token_ids if sampling.repetition_penalty != 1 else ()
    output = sequence.output_token_ids + said if sampling.has_penalties else ()
    return SamplingMetadata(sampling, request.seed, sequence.num_tokens + len(said), prompt, output, mask)


def _masks(constraint: Constraint | None, draft: list[int]) -> list[bytes | None]:
    """A mask per row. Rows behind a forbidden draft token have none: it cannot be drawn, so nobody asks for them."""
    masks: list[bytes | None] = [None] * (len(draft) + 1)
    if constraint is None:
        return masks
    masks[0] = constraint.mask()
    num_accepted = 0
    while num_accepted < len(draft) and constraint.accept([draft[num_accepted]]):
        num_accepted += 1
        masks[num_accepted] = constraint.mask()
    constraint.rollback(num_accepted)
    return masks

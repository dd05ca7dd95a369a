"""Sampling metadata on the host: one record per row of logits, one row per sequence and per draft token. No torch."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from runtime.core.request import Constraint, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, paths


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Parameters of one row. They depend on its sequence only, so its token does not depend on the rest of the batch.

    Attributes:
        position: position of the new token in its sequence.
        prompt_token_ids, output_token_ids: tokens before it, as far as penalties need them.
        mask: one bit per token id, lowest bit of the first byte first; only tokens whose bit is set may be sampled.
            None allows all.
    """

    sampling: SamplingParams
    seed: int
    position: int
    prompt_token_ids: TokenIds[int] = ()
    output_token_ids: TokenIds[int] = ()
    mask: bytes | None = None


def build_sampling_metadata(entry: ScheduledSequence) -> list[SamplingMetadata]:
    """Builds the metadata of rows `num_tokens - 1` to `num_tokens - 1 + num_draft_tokens` of an entry that samples.

    Row `i` treats draft token `i - 1` and those before it (its ancestors in a tree) as accepted: they are in its
    history and in the state of its constraint. The constraint is restored; a sequence with a constraint has no tree.
    """
    sequence = entry.sequence
    draft = sequence.draft_token_ids[: entry.num_draft_tokens]
    masks = _masks(sequence.constraint, draft)
    drafted = [[], *([draft[number] for number in path] for path in paths(entry.draft_parents))]
    return [_metadata(sequence, before, mask) for before, mask in zip(drafted, masks, strict=True)]


def _metadata(sequence: Sequence, drafted: list[int], mask: bytes | None) -> SamplingMetadata:
    request, sampling = sequence.request, sequence.request.sampling
    prompt = request.prompt_token_ids if sampling.repetition_penalty != 1 else ()
    output = sequence.output_token_ids + drafted if sampling.has_penalties else ()
    return SamplingMetadata(sampling, request.seed, sequence.num_tokens + len(drafted), prompt, output, mask)


def _masks(constraint: Constraint | None, draft: list[int]) -> list[bytes | None]:
    """Returns a mask per row. Rows after a forbidden draft token have none: that token is never accepted."""
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

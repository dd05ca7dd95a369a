"""Plan and output of one step, draft trees, sampling metadata, and the interface of a runner. No torch."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import Protocol

from runtime.core.attention_window import AttentionWindow
from runtime.core.request import Constraint, SamplingParams, Sequence, TokenLogprobs


def chain(count: int) -> list[int]:
    """Returns the parents of `count` draft tokens that form a chain."""
    return list(range(-1, count - 1))


def paths(parents: ListOf[int]) -> list[list[int]]:
    """Returns for each draft token the indices of its ancestors, the oldest first, and its own."""
    found: list[list[int]] = []
    for number, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), number])
    return found


def depth(parents: ListOf[int]) -> int:
    """Returns the number of tokens in the longest branch."""
    return max(map(len, paths(parents)), default=0)


def ancestor_bits(parents: ListOf[int]) -> list[int]:
    """Returns attention bits of the known token (bit 0) and of each draft token: itself and its ancestors."""
    return [1, *(1 | sum(2 << number for number in path) for path in paths(parents))]


def grow_tree(branches: ListOf[ListOf[int]], max_tokens: int) -> tuple[list[int], list[int]]:
    """Merges branches into one draft, the first branch first; returns its tokens and their parents.

    Parents are empty if the draft is a chain. At most `max_tokens` tokens are kept.
    """
    if len(branches) == 1:
        return list(branches[0][:max_tokens]), []
    draft: list[int] = []
    parents: list[int] = []
    for branch in branches:
        number = -1
        for token_id in branch:
            known = find_child(draft, parents, number, token_id)
            if known is None:
                if len(draft) == max_tokens:
                    break
                draft.append(token_id)
                parents.append(number)
                known = len(draft) - 1
            number = known
    return draft, [] if parents == chain(len(parents)) else parents


def follow(draft: ListOf[int], parents: ListOf[int], token_ids: ListOf[int]) -> list[int]:
    """Returns the indices of the draft tokens along a path of sampled tokens, up to the first that is not in the
    draft."""
    path: list[int] = []
    for token_id in token_ids:
        number = find_child(draft, parents, path[-1] if path else -1, token_id)
        if number is None:
            break
        path.append(number)
    return path


def find_child(draft: ListOf[int], parents: ListOf[int], number: int, token_id: int) -> int | None:
    """Returns the index of a draft token with this id and this parent, if there is one."""
    children = range(number + 1, len(draft))
    return next((child for child in children if parents[child] == number and draft[child] == token_id), None)


@dataclass(slots=True)  # one per token, as deltas
class ScheduledSequence:
    """The span `[start, start + num_tokens)` of a sequence to compute, draft tokens included. If it reaches the end of
    the known tokens, the runner samples one token, and one more per accepted draft token."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens in the span."""
        return max(0, self.start + self.num_tokens - self.sequence.num_tokens)

    @property
    def draft_parents(self) -> list[int]:
        """Parent of each draft token in the span."""
        count = self.num_draft_tokens
        return self.sequence.draft_parents[:count] or chain(count)

    @property
    def has_tree(self) -> bool:
        return bool(self.sequence.draft_parents) and self.num_draft_tokens > 0

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens >= self.sequence.num_tokens and not self.sequence.request.is_prompt_only


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of a block's first `num_tokens` slots to another block, before the forward pass."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockOffload:
    """A copy of a block to a slot of host memory."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class BlockRestore:
    """A copy of a slot of host memory to a block."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Input of the runner for one step: spans to compute, and block moves before that.

    Blocks move in this order: offloads, copies (all read before any is written), restores. Blocks are allocated while
    the plan is made, so one plan may read a block for its last owner and write it for its next one; reads come first.
    Offloaded and copied blocks were computed in an earlier step, and only copies and restores write blocks. Copies read
    no restored block. A slot that one plan both saves and restores holds what was just saved: offloads precede
        restores,
    no slot is saved twice, and a slot that a restore reads is not given to another hash.
    """

    entries: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    offloads: tuple[BlockOffload, ...] = ()
    restores: tuple[BlockRestore, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token sampled for one sequence. If the row was not finite, `error` is set and the token id is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one step, by sequence id.

    Attributes:
        tokens: sampled tokens of each entry that samples; several if draft tokens were accepted.
        prompt_logprobs: log-probabilities of the prompt tokens after those of the span, for sequences that need them.
        hidden_sums: sum of the span's final hidden states `[hidden_size]`, for sequences that embed.
        path: how the step was run, where there are several ways: `recorded`, or why it was not among the recorded ones.
    """

    tokens: dict[str, list[SampledToken]]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    hidden_sums: dict[str, list[float]] = field(default_factory=dict)
    path: str = ""


class Runner(Protocol):
    """The model runner as the engine uses it."""

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks; plans use ids 0 to num_blocks - 1."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Number of host memory slots for evicted blocks; plans use ids 0 to num_host_blocks - 1."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens."""
        ...

    @property
    def attention_window(self) -> AttentionWindow:
        """Tokens that a token attends to; keys and values outside of it are not needed."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether a block holds the whole state of its tokens, so that sequences may share blocks."""
        ...

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of token ids."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a sequence unless it ignores them."""
        ...

    def execute(self, plan: StepPlan) -> StepOutput:
        """Runs one forward pass over the plan's spans and samples where a span reaches the end of its sequence."""
        ...


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

    @property
    def changes_logits(self) -> bool:
        """Whether bias, mask or penalties apply."""
        return bool(self.sampling.logit_bias) or self.mask is not None or self.sampling.has_penalties


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

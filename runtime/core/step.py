"""One step: what the scheduler plans, what the runner makes of it, and what a runner is. No torch: engine and scheduler
are tested with a fake runner in microseconds."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Protocol

from runtime.core.attention_window import AttentionWindow
from runtime.core.request import Sequence, TokenLogprobs


def chain(count: int) -> list[int]:
    """Parents in a draft that is no tree."""
    return list(range(-1, count - 1))


def paths(parents: ListOf[int]) -> list[list[int]]:
    """For each token of a draft the numbers of its ancestors, the oldest first, and its own."""
    found: list[list[int]] = []
    for number, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), number])
    return found


def depth(parents: ListOf[int]) -> int:
    """Tokens of the longest branch."""
    return max(map(len, paths(parents)), default=0)


def ancestor_bits(parents: ListOf[int]) -> list[int]:
    """What the known token, bit 0, and each token of the draft see of these: themselves and their ancestors."""
    return [1, *(1 | sum(2 << number for number in path) for path in paths(parents))]


def grow_tree(branches: ListOf[ListOf[int]], max_tokens: int) -> tuple[list[int], list[int]]:
    """The draft, and its parents, that begins with the first branch and has the others' tokens where they differ. No
    parents where that is a chain; branches that exceed `max_tokens` are cut."""
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


def follow(draft: ListOf[int], parents: ListOf[int], said: ListOf[int]) -> list[int]:
    """Numbers of the draft's tokens that were said, one after the other; the last token said need not be among them."""
    path: list[int] = []
    for token_id in said:
        number = find_child(draft, parents, path[-1] if path else -1, token_id)
        if number is None:
            break
        path.append(number)
    return path


def find_child(draft: ListOf[int], parents: ListOf[int], number: int, token_id: int) -> int | None:
    """The guess that this token follows that one."""
    children = range(number + 1, len(draft))
    return next((child for child in children if parents[child] == number and draft[child] == token_id), None)


@dataclass(slots=True)  # one per token, as deltas
class ScheduledSequence:
    """Compute tokens `[start, start + num_tokens)` of `sequence`, its draft included. When the span reaches the end of
    the known tokens, the runner also samples what follows them: one token, and one more per accepted draft token."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of the span that are guesses."""
        return max(0, self.start + self.num_tokens - self.sequence.num_tokens)

    @property
    def draft_parents(self) -> list[int]:
        """The parent of each guess of the span (see `runtime.core.step`)."""
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
    """Copy a block's pages to another block, before the forward pass; the first `num_tokens` slots are needed."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockOffload:
    """Save a block's pages in a slot of host memory."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class BlockRestore:
    """Fill a block's pages from a slot of host memory."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the runner sees of one step: which spans to compute, and which blocks move before that.

    Blocks move in this order: offloads, copies (all read before any is written), restores. Blocks are handed out while
    the plan is made, so a block may be read for its last owner and written for its next one in the same plan; reading
    comes first. What is offloaded or copied was computed in an earlier step, and only copies and restores write blocks.
    Copies read no restored block. A slot that is saved to and restored from in one plan holds what was just saved:
    offloads are before restores, no slot is saved to twice, and one that a restore reads is not given to another hash.
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
    """A token drawn for one sequence. `error` is set instead when the row was not finite; the token id is then -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed, by sequence id.

    Attributes:
        tokens: for each entry of the plan that samples. A list, because verified drafts yield several.
        prompt_logprobs: of the tokens that follow the span's ones inside the prompt, for sequences that ask for them.
        hidden_sums: sum of the span's final hidden states `[hidden_size]`, for sequences that embed.
        path: how the step was run, where there are several ways: `recorded`, or why it was not among the recorded ones.
    """

    tokens: dict[str, list[SampledToken]]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    hidden_sums: dict[str, list[float]] = field(default_factory=dict)
    path: str = ""


class Runner(Protocol):
    """The part below the torch line, as the engine sees it."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there are; the plan uses ids 0 to num_blocks - 1."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Slots of host memory for evicted blocks; the plan uses ids 0 to num_host_blocks - 1."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        ...

    @property
    def attention_window(self) -> AttentionWindow:
        """What tokens look at: keys and values beyond it are not needed."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether a block holds all that is known of its tokens, so that sequences may begin with blocks of others."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids of prompts lie below this."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence unless it ignores them."""
        ...

    def execute(self, plan: StepPlan) -> StepOutput:
        """Runs one forward pass over the plan's spans and samples where a span reaches its sequence's end."""
        ...

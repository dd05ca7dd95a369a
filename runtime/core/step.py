"""Plan and output of one step, and the interface of a runner. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from compress.common.errors import ToolkitError
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow
from runtime.core.draft_states import StateCosts
from runtime.core.draft_tree import chain
from runtime.core.request import LogprobColumns, Sequence, TokenLogprobs

NO_STATE = -1
"""Slot number of a sequence whose recurrent state starts at zero."""

KNOWN = -1
"""Source row of an entry whose tokens are known."""


@dataclass(slots=True)  # created once per token, as deltas
class ScheduledSequence:
    """The span `[start, start + num_tokens)` of a sequence to compute, draft tokens included. If it reaches the end of
    the known tokens, the runner samples one token, and one more per accepted draft token.

    Attributes:
        state_read: slot with the recurrent state before the span, or `NO_STATE`.
        state_writes: ascending pairs of an offset into the span and a slot: the recurrent state after the token at that
            offset is written to the slot. The last pair is that of the last token. Empty for models without such
            states.
        source_row: index of an entry of the previously submitted step, whose unread token is the only one of this span;
            `KNOWN` if the sequence has its tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    state_read: int = NO_STATE
    state_writes: tuple[tuple[int, int], ...] = ()
    source_row: int = KNOWN

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens in the span."""
        if self.source_row != KNOWN:
            return 0
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
    """Copy of a block's first `num_tokens` slots to another block, before the forward pass."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockOffload:
    """Copy of a block, or of a recurrent state, to a slot of host memory."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class BlockRestore:
    """Copy of a slot of host memory to a block, or to a slot for a recurrent state."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Input of the runner for one step: spans to compute, and block moves before that.

    Blocks move in this order: offloads, copies (all read before any is written), restores. Blocks are allocated while
    the plan is made, so one plan may read a block for its last owner and write it for its next one; reads come first.
    Offloaded and copied blocks were computed in an earlier step, and only copies and restores write blocks. Copies read
    no restored block. A slot that one plan both saves and restores holds the data just saved: offloads precede
    restores, no slot is saved twice, and a slot that a restore reads is not given to another hash. Recurrent states
    move likewise, before the forward pass reads and writes them.
    """

    entries: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    offloads: tuple[BlockOffload, ...] = ()
    restores: tuple[BlockRestore, ...] = ()
    state_offloads: tuple[BlockOffload, ...] = ()
    state_restores: tuple[BlockRestore, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


class RunnerLostError(ToolkitError):
    """A runner that can compute no further step, as another process that it needs has ended."""


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
        pooled: sum `[hidden_size]` of the span's final hidden states, or the last of them, for embedding sequences.
        path: execution path of the step, if there are several: `recorded` (CUDA graph), the reason why not, or both for
            parts of it.
        expert_lookups: total number of chosen experts with host memory copies, and of those found on the device.
    """

    tokens: dict[str, list[SampledToken]]
    prompt_logprobs: dict[str, LogprobColumns] = field(default_factory=dict)
    pooled: dict[str, list[float]] = field(default_factory=dict)
    path: str = ""
    expert_lookups: tuple[int, int] = (0, 0)


class SubmittedStep(Protocol):
    """Step that is running or complete."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next plan may refer to this step by `source_row` before `result` is called, for sequences that
        need only its tokens."""

    def result(self) -> StepOutput:
        """Waits for the output. If the next plan is already submitted, tokens that need a second pass over the logits
        are missing and must be sampled again.

        Raises:
            Exception: the step failed.
        """


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Submitted step whose output is known."""

    output: StepOutput
    feeds_next: ClassVar[bool] = False

    def result(self) -> StepOutput:
        return self.output


class Runner(Protocol):
    """Interface of a model runner.

    Attributes:
        num_blocks: pages of the KV cache; plans use ids 0 to num_blocks - 1.
        max_model_len: longest prompt plus output in tokens.
        vocab_size: upper bound (exclusive) of token ids.
        eos_token_ids: token ids that end a sequence unless it ignores them.
        num_host_blocks: host memory slots for evicted blocks; plans use ids 0 to num_host_blocks - 1.
        num_state_slots: slots for recurrent states; plans use ids 0 to num_state_slots - 1. 0 without such states.
        num_host_states: host memory slots for evicted recurrent states; plans use ids 0 to num_host_states - 1.
        state_costs: costs of recurrent states of draft tokens.
        attention_window: tokens that a token attends to; keys and values outside of it are not needed.
        shares_blocks: whether a block holds the whole state of its tokens, so that sequences may share blocks.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    num_host_blocks: int = 0
    num_state_slots: int = 0
    num_host_states: int = 0
    state_costs: StateCosts = StateCosts()
    attention_window: AttentionWindow = FULL_ATTENTION
    shares_blocks: bool = True

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Starts one forward pass over the plan's spans, and samples if a span reaches the end of its sequence. Plans
        run in the order of submission."""

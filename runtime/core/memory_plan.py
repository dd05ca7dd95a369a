"""Memory that serving allocates: weights, keys and values, and the room they leave. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.state_dtype import STATE_FLOAT32, MeasuredStates
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow

MAX_COPIED_KEYS = 32768
"""Keys of one sequence that a step on a GPU may copy out of their pages, for one layer at a time."""


@dataclass(frozen=True, slots=True)
class KVCacheChoice:
    """A scheme, why it, and what cannot be had with it."""

    scheme: KVCacheScheme = UNCOMPRESSED
    reason: str = "the default"
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """`int4 rotated (as asked for)`."""
        return f"{self.scheme} ({self.reason})"


DEFAULT_CHOICE = KVCacheChoice()


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Memory for keys and values.

    Attributes:
        nbytes: at most.
        reason: why so much.
        step_bytes: beside it, for what a GPU computes.
        spare_bytes: kept free for the allocator.
    """

    nbytes: int
    reason: str
    step_bytes: int = 0
    spare_bytes: int = 0


NO_BUDGET = KVBudget(0, "as many blocks as asked for")


SPARE_RESIDUAL_TOKENS = 17
"""Slots beyond a sequence's residual window: one that is known and the longest draft. What a rejected
draft overwrote is out of sight then."""


@dataclass(frozen=True, slots=True)
class ExactTokens:
    """Tokens whose keys and values are kept as they were computed, beside the blocks.

    Attributes:
        per_sequence: tokens of a sequence that have room.
        num_sequences: that have such tokens at the same time, at most.
        token_bytes: keys and values of one of them in all layers.
    """

    per_sequence: int = 0
    num_sequences: int = 0
    token_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.per_sequence * self.num_sequences * self.token_bytes

    def __str__(self) -> str:
        return f"{self.per_sequence} tokens of {self.num_sequences} sequences"


NO_EXACT_TOKENS = ExactTokens()


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots for recurrent states, each for the state of one sequence in all layers.

    Attributes:
        slot_bytes: of one; 0 for a model without such layers.
        num_host_slots: for states in host memory that were evicted from the others.
        dtype: of matrices that are computed in float32, by name.
        measured: what that costs the checkpoint; None for float32.
    """

    num_slots: int = 0
    slot_bytes: int = 0
    num_host_slots: int = 0
    dtype: str = STATE_FLOAT32
    measured: MeasuredStates | None = None

    @property
    def form(self) -> str:
        """Dtype and cost where states are not kept in float32; "" otherwise."""
        return "" if self.measured is None else f" in {self.dtype} (measured {self.measured})"

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def max_running(self) -> int:
        """Most sequences that run at the same time where states are saved, too."""
        return most_running(self.num_slots)


def most_running(num_slots: int) -> int:
    """Returns for how many running sequences slots are enough where states are saved: half of the slots, one at
    least."""
    return max(num_slots // 2, min(num_slots, 1))


NO_STATES = StateSlots()

MOST_DRAFT_ROWS = 256
"""Tokens of a captured step that verifies drafts: with more of them computing takes longer than launching."""


def captured_rows(num_sequences: int, num_draft_tokens: int) -> int:
    """Tokens of the largest captured step: one of each sequence, and its draft as far as `MOST_DRAFT_ROWS` reach."""
    return max(num_sequences, min(num_sequences * (1 + num_draft_tokens), MOST_DRAFT_ROWS))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of all that will be allocated.

    Attributes:
        weight_bytes: prepared weights on the device, embedding included.
        token_bytes: keys and values of one token in all layers.
        num_blocks: KV blocks of `block_size` tokens.
        max_model_len: longest prompt + output.
        reason: what decided `num_blocks` and `max_model_len`.
        num_host_blocks: blocks of the same size in host memory.
        attention_window: what tokens look at; a sequence keeps blocks for nothing else.
        blocks_per_sequence: held at the same time by the longest sequence.
        kv_choice: form of keys and values.
        exact: keys and values that are kept as they are beside the blocks.
        num_sequences: computed in one step, at most.
        num_draft_tokens: of a sequence in one step, at most.
        drafts_trees: these may be trees.
        budget: memory that the pool could take, and what stays free beside it.
        expert_bytes: experts in host memory.
        states: recurrent states, in the same memory.
    """

    weight_bytes: int
    token_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    reason: str
    num_host_blocks: int = 0
    attention_window: AttentionWindow = FULL_ATTENTION
    blocks_per_sequence: int = 0
    kv_choice: KVCacheChoice = DEFAULT_CHOICE
    exact: ExactTokens = NO_EXACT_TOKENS
    num_sequences: int = 0
    budget: KVBudget = NO_BUDGET
    expert_bytes: int = 0
    states: StateSlots = NO_STATES
    num_draft_tokens: int = 0
    drafts_trees: bool = False

    @property
    def captured_rows(self) -> int:
        """Tokens that captured steps have room for."""
        return captured_rows(self.num_sequences, self.num_draft_tokens)

    @property
    def kv_cache(self) -> KVCacheScheme:
        return self.kv_choice.scheme

    @property
    def reach(self) -> AttentionWindow:
        """Tokens that a step lays block tables out for: without keys and values, a token itself only."""
        return self.attention_window if self.token_bytes else AttentionWindow(1)

    @property
    def tokens(self) -> int:
        """Tokens that the blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the blocks and of the exact tokens beside them."""
        return self.tokens * self.token_bytes + self.exact.nbytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys, values and recurrent states."""
        return self.kv_bytes + self.states.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for keys, values and states that were evicted from the pools."""
        states = self.states.num_host_slots * self.states.slot_bytes
        return self.num_host_blocks * self.block_size * self.token_bytes + states

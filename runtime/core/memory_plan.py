"""Memory that serving allocates: weights, KV cache, recurrent states, and the remaining memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.state_dtype import STATE_FLOAT32, MeasuredStates
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow

MAX_COPIED_KEYS = 32768
"""Maximum quantized keys of one sequence that a GPU step copies in 16 bits, one layer at a time."""
PANEL_ELEMENTS = 2**27
"""Most numbers of a packed weight that a GPU step keeps dequantized at one time: 256 MiB in 16 bits hold each linear of
an 8B model's layers."""


@dataclass(frozen=True, slots=True)
class KVCacheChoice:
    """KV cache scheme, the reason for it, and the features it disables."""

    scheme: KVCacheScheme = UNCOMPRESSED
    reason: str = "the default"
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describes the choice: `int4 rotated (as asked for)`."""
        return f"{self.scheme} ({self.reason})"


DEFAULT_CHOICE = KVCacheChoice()


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Memory for keys and values.

    Attributes:
        nbytes: upper limit.
        reason: explanation of the limit.
        step_bytes: additional bytes for activations on a GPU.
        spare_bytes: bytes kept free for the allocator.
    """

    nbytes: int
    reason: str
    step_bytes: int = 0
    spare_bytes: int = 0


NO_BUDGET = KVBudget(0, "as many blocks as asked for")


SPARE_RESIDUAL_TOKENS = 17
"""Slots beyond a sequence's residual window: one known token and the longest draft. Entries that a rejected
draft overwrites are then outside the window."""


@dataclass(frozen=True, slots=True)
class ExactTokens:
    """Tokens whose keys and values stay unquantized, in addition to the blocks.

    Attributes:
        per_sequence: capacity per sequence.
        num_sequences: maximum number of sequences.
        token_bytes: bytes of keys and values of one token in all layers.
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
        slot_bytes: size of a slot; 0 for a model without recurrent layers.
        num_host_slots: slots in host memory for evicted states.
        dtype: storage dtype by name, of states that are computed in float32.
        measured: measured loss of this dtype; None for float32.
    """

    num_slots: int = 0
    slot_bytes: int = 0
    num_host_slots: int = 0
    dtype: str = STATE_FLOAT32
    measured: MeasuredStates | None = None

    @property
    def form(self) -> str:
        """Describes dtype and loss if states are not stored in float32; "" otherwise."""
        return "" if self.measured is None else f" in {self.dtype} (measured {self.measured})"

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def max_running(self) -> int:
        """Maximum number of running sequences that leaves slots for saved states."""
        return most_running(self.num_slots)


def most_running(num_slots: int) -> int:
    """Returns the maximum number of running sequences if states are also saved: half of the slots, at least one."""
    return max(num_slots // 2, min(num_slots, 1))


NO_STATES = StateSlots()

MOST_DRAFT_ROWS = 256
"""Maximum tokens of a captured step that verifies drafts: with more, computing takes longer than launching."""


MOST_PROMPT_ROWS = 512
"""Maximum tokens of a captured step with prompts, for the same reason."""


def captured_rows(num_sequences: int, num_draft_tokens: int) -> int:
    """Returns the tokens of the largest captured step: one per sequence, plus drafts up to `MOST_DRAFT_ROWS`."""
    return max(num_sequences, min(num_sequences * (1 + num_draft_tokens), MOST_DRAFT_ROWS))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of all allocations.

    Attributes:
        weight_bytes: bytes of prepared weights on the device, embedding included.
        token_bytes: bytes of keys and values of one token in all layers.
        num_blocks: pages of `block_size` tokens.
        max_model_len: longest prompt + output.
        reason: explanation of `num_blocks` and `max_model_len`.
        num_host_blocks: blocks of the same size in host memory.
        attention_window: tokens to attend to; a sequence holds blocks for these only.
        blocks_per_sequence: blocks that the longest sequence holds.
        kv_choice: format of the KV cache.
        exact: tokens that stay unquantized in addition to the blocks.
        num_sequences: maximum number of sequences per step.
        num_draft_tokens: maximum number of draft tokens per sequence and step.
        drafts_trees: whether drafts may be trees.
        prompt_rows: maximum tokens of a captured step with prompts; 0 captures none.
        reach: tokens covered by the block tables of a step; 1 for models without keys and values. All stages of a model
            have the same, because the order of rows follows from the tables.
        budget: memory limit of the pool, and memory kept free.
        expert_bytes: bytes of experts in host memory.
        states: slots for recurrent states, in the same memory.
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
    prompt_rows: int = 0
    reach: AttentionWindow = FULL_ATTENTION

    @property
    def captured_rows(self) -> int:
        """Capacity of captured steps in tokens whose logits are computed."""
        return captured_rows(self.num_sequences, self.num_draft_tokens)

    @property
    def kv_cache(self) -> KVCacheScheme:
        return self.kv_choice.scheme

    @property
    def tokens(self) -> int:
        """Capacity of the blocks in tokens."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the blocks and of the unquantized tokens."""
        return self.tokens * self.token_bytes + self.exact.nbytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of KV cache and recurrent states."""
        return self.kv_bytes + self.states.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for keys, values and states evicted from the pools."""
        states = self.states.num_host_slots * self.states.slot_bytes
        return self.num_host_blocks * self.block_size * self.token_bytes + states

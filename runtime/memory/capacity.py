"""Capacity for tokens, requests and recurrent states next to weights of a known size, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.state_dtype import STATE_FLOAT32
from runtime.core.attention_window import AttentionWindow
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import NO_EXACT_TOKENS, NO_STATES, ExactTokens, StateSlots
from runtime.core.model_config import DecoderConfig
from runtime.memory.estimate import exact_tokens, kv_token_bytes, step_bytes
from runtime.memory.plan import STATE_SHARE, choose_model_kv_cache, find_model_window, longest_wanted

PROCESS_BYTES = 350 * 2**20
"""Python, torch and the server without any model (measured on Linux with a CPU build)."""
TYPICAL_LENGTHS = (512, 2048, 8192, 32768, 131072)
ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory of one served model.

    Attributes:
        memory_bytes: that serving may use in all.
        weight_bytes: prepared.
        activation_bytes: of the largest step, attention over long contexts left out.
        token_bytes: keys and values of one token in all layers, in the form in which they are kept.
        dtype: of activations, and of keys and values while they are used.
        context: longest prompt + output.
        num_layers: of the size of the largest; attention reads a copy of its keys and values in `dtype`.
        step: tokens of one prompt that are computed together at most.
        kv_cache: form of keys and values.
        exact: keys and values that are kept in `dtype` in addition to the blocks.
        state_bytes: recurrent state of one sequence.
        state_dtype: of matrices in it that are computed in float32.
    """

    memory_bytes: int
    weight_bytes: int
    activation_bytes: int
    token_bytes: int
    dtype: str
    context: int
    num_layers: int
    attention_window: AttentionWindow
    block_size: int
    step: int
    process_bytes: int = PROCESS_BYTES
    kv_cache: KVCacheScheme = UNCOMPRESSED
    exact: ExactTokens = NO_EXACT_TOKENS
    state_bytes: int = 0
    state_dtype: str = STATE_FLOAT32

    @property
    def room(self) -> int:
        """Bytes for keys, values and the copy that attention reads; below zero when the rest does not fit."""
        return self.memory_bytes - self.weight_bytes - self.activation_bytes - self.process_bytes

    @property
    def num_blocks(self) -> int:
        if not self.token_bytes:
            return self.states.max_running * self._blocks_for(self.context)
        copied = self.exact.token_bytes or self.token_bytes
        shares = (self.token_bytes * self.num_layers + copied) * self.block_size
        return max(0, (self.room - self.exact.nbytes - self.states.nbytes) * self.num_layers // shares)

    @property
    def states(self) -> StateSlots:
        """Slots for recurrent states in their share of what keys, values and states take."""
        if not self.state_bytes:
            return NO_STATES
        if not self.token_bytes:
            return StateSlots(max(0, self.room // self.state_bytes), self.state_bytes)
        # Where half of the memory is for states, the room holds both halves and the copy of one.
        copied, own = self.exact.token_bytes or self.token_bytes, self.token_bytes * self.num_layers
        share = (self.room * own + self.exact.nbytes * copied) // (STATE_SHARE * own + (STATE_SHARE - 1) * copied)
        return StateSlots(max(0, share // self.state_bytes), self.state_bytes)

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Value of `--kv-memory` that uses all of the room."""
        return self.tokens * self.token_bytes + self.exact.nbytes + self.states.nbytes

    def concurrency(self, length: int) -> int:
        """Requests of `length` tokens (prompt plus output) that fit together."""
        fitting = self.num_blocks // self._blocks_for(length)
        return min(fitting, self.states.max_running) if self.state_bytes else fitting

    def _blocks_for(self, length: int) -> int:
        return self.attention_window.blocks_for(length, self.step, self.block_size)

    def lengths(self) -> list[int]:
        """Typical lengths below the context, then the context."""
        return [length for length in TYPICAL_LENGTHS if length < self.context] + [self.context]

    def changed(self, model: DecoderConfig, dtype: str = "", format: str = "", weight_bytes: int = 0) -> Capacity:
        """The same in another dtype, with weights of that, or with keys and values in another format. Unless that is
        the same, no exact tokens are kept."""
        dtype, is_same = dtype or self.dtype, format in ("", self.kv_cache.format)
        scheme = self.kv_cache if is_same else KVCacheScheme.named(format)
        return replace(
            self,
            weight_bytes=weight_bytes or self.weight_bytes,
            activation_bytes=self.activation_bytes * ITEM_SIZES[dtype] // ITEM_SIZES[self.dtype],
            token_bytes=kv_token_bytes(model, scheme, ITEM_SIZES[dtype]),
            dtype=dtype,
            kv_cache=scheme,
            exact=exact_tokens(model, scheme, ITEM_SIZES[dtype], self.exact.num_sequences),
            state_bytes=model.state_bytes(ITEM_SIZES[dtype], self.state_dtype),
        )


def activation_bytes(model: DecoderConfig, config: RuntimeConfig, itemsize: int) -> int:
    """Estimate of what the largest step holds in addition to weights and the pool."""
    longest, _ = longest_wanted(model, config)
    # Keys that a span of a prompt looks at, at most.
    blocks = find_model_window(model, config).blocks_for(longest, config.max_span_tokens, config.block_size)
    return step_bytes(model, config, itemsize, min(longest, blocks * config.block_size) if model.spec.attentions else 0)


def estimate(model: DecoderConfig, config: RuntimeConfig, dtype: str, weight_bytes: int, memory_bytes: int) -> Capacity:
    """Estimates what fits in addition to weights of a known size.

    Args:
        dtype: of activations, keys and values, by name.
        memory_bytes: for everything.

    Raises:
        ToolkitError: a length or a window that the model cannot have.
    """
    itemsize, attention_window = ITEM_SIZES[dtype], find_model_window(model, config)
    scheme = choose_model_kv_cache(model, config, attention_window).scheme
    return Capacity(
        memory_bytes,
        weight_bytes,
        activation_bytes(model, config, itemsize),
        kv_token_bytes(model, scheme, itemsize),
        dtype,
        longest_wanted(model, config)[0],
        model.num_kv_layers,
        attention_window,
        config.block_size,
        config.max_span_tokens,
        kv_cache=scheme,
        exact=exact_tokens(model, scheme, itemsize, config.max_num_seqs),
        state_bytes=model.state_bytes(itemsize, config.state_dtype),
        state_dtype=config.state_dtype,
    )

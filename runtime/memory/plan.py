"""How much memory serving takes: weights, keys and values, and what that leaves room for. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.common.device import format_bytes
from compress.common.errors import ToolkitError
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow, resolve_attention_window
from runtime.core.config import RuntimeConfig
from runtime.memory.estimates import gpu_step_bytes
from runtime.memory.kv import (
    DEFAULT_CHOICE,
    NO_BUDGET,
    NO_EXACT_TOKENS,
    ExactTokens,
    KVBudget,
    KVCacheChoice,
    choose_kv_cache,
    exact_tokens,
    find_budget,
    kv_token_bytes,
)

if TYPE_CHECKING:
    from runtime.core.model_config import DecoderConfig


STREAM_LENGTH = 2**20
"""Longest sequence where tokens look at sinks and a window only, unless another length is asked for."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What will be allocated.

    Attributes:
        weight_bytes: prepared weights, embedding included.
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
        budget: memory that the pool could take, and what stays free beside it.
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

    @property
    def kv_cache(self) -> KVCacheScheme:
        return self.kv_choice.scheme

    @property
    def kv_bytes(self) -> int:
        """Of the blocks and of what is exact beside them."""
        return self.num_blocks * self.block_size * self.token_bytes + self.exact.nbytes

    @property
    def host_bytes(self) -> int:
        """Of host memory, for keys and values that were evicted from the pool."""
        return self.num_host_blocks * self.block_size * self.token_bytes


def plan_memory(
    model: DecoderConfig, weight_bytes: int, itemsize: int, config: RuntimeConfig, free_gpu_bytes: int | None = None
) -> MemoryPlan:
    """Decides the number of KV blocks and the longest sequence.

    Blocks that no schedule could fill are not allocated. Without a wish for `max_model_len`, a context that the pool
    cannot hold is shortened to what it can. Where tokens look back only so far, a sequence of any length needs blocks
    for that and for one span of a prompt.

    Args:
        weight_bytes: of the prepared weights.
        itemsize: bytes of one element of keys and values.
        free_gpu_bytes: of the GPU that serves, beside the weights; None on a CPU.

    Raises:
        ToolkitError: a length beyond the model's context, a pool that cannot hold one sequence of that length, an
            attention window that does not fit in the context, or a GPU that has nothing left for keys and values.
    """
    attention_window = resolve_attention_window(
        model.windows, model.context_length, config.attention_window, config.attention_sinks
    )
    choice = choose_kv_cache(model.kv_cache, config, attention_window, model.kv_measured)
    token_bytes = kv_token_bytes(model, choice.scheme, itemsize)
    exact = exact_tokens(model, choice.scheme, itemsize, config.max_num_seqs)
    budget = find_budget(config, gpu_step_bytes(model, config, itemsize), free_gpu_bytes)
    _check_exact(config, exact, budget)
    pool = _fill(config, attention_window, longest_wanted(model, config), token_bytes, budget.nbytes - exact.nbytes)
    return MemoryPlan(
        weight_bytes,
        token_bytes,
        config.block_size,
        pool.num_blocks,
        pool.max_model_len,
        pool.reason,
        _host_blocks(config, choice, token_bytes * config.block_size),
        attention_window,
        pool.blocks_per_sequence,
        choice,
        exact,
        config.max_num_seqs,
        budget,
    )


class _Pool(NamedTuple):
    """Fields of a `MemoryPlan`."""

    num_blocks: int
    blocks_per_sequence: int
    max_model_len: int
    reason: str


def _fill(
    config: RuntimeConfig, attention_window: AttentionWindow, longest: tuple[int, str], token_bytes: int, kv_bytes: int
) -> _Pool:
    """As many blocks as so many bytes hold, or as can be used.

    Args:
        longest: tokens of the longest sequence if there is memory for it, and why so many.

    Raises:
        ToolkitError: they cannot hold one sequence of the length that was asked for.
    """
    length, reason = longest
    affordable = config.num_blocks or kv_bytes // (token_bytes * config.block_size)
    needed = attention_window.blocks_for(length, config.max_span_tokens, config.block_size)
    if affordable < 1 or (config.max_model_len is not None and affordable < needed):
        raise ToolkitError(
            f"a sequence of {length} tokens needs {needed} KV blocks "
            f"({format_bytes(needed * config.block_size * token_bytes)}), and the pool has {affordable}",
            "Allow more KV memory or a shorter --max-model-len",
        )
    num_blocks = config.num_blocks or min(affordable, config.max_num_seqs * needed)
    if num_blocks >= needed:
        return _Pool(num_blocks, needed, length, reason)
    length = num_blocks * config.block_size
    return _Pool(num_blocks, num_blocks, length, f"what the KV pool holds; {reason} is {longest[0]}")


def _check_exact(config: RuntimeConfig, exact: ExactTokens, budget: KVBudget) -> None:
    """Refuses exact tokens beside which there is no memory for blocks."""
    if not exact.nbytes or config.num_blocks or exact.nbytes < budget.nbytes:
        return
    raise ToolkitError(
        f"{exact.per_sequence} exact tokens of each of {exact.num_sequences} sequences take "
        f"{format_bytes(exact.nbytes)}, all of the {format_bytes(budget.nbytes)} of KV memory",
        "Keep fewer of them exact (--kv-residual-length, --kv-sinks), allow fewer --max-num-seqs or more --kv-memory",
    )


def longest_wanted(model: DecoderConfig, config: RuntimeConfig) -> tuple[int, str]:
    """Tokens of the longest sequence if there is memory for it, and why so many.

    Raises:
        ToolkitError: more than the model's context is asked for, and no window.
    """
    wanted, streams = config.max_model_len, config.attention_window is not None
    if wanted is None:
        return (STREAM_LENGTH, "the length of streams") if streams else (model.context_length, "the model's context")
    if wanted < 1 or (wanted > model.context_length and not streams):
        raise ToolkitError(
            f"max_model_len={wanted} is not between 1 and the model's context of {model.context_length} tokens",
            f"Use --max-model-len {model.context_length} or less, or --attention-window to serve endless streams",
        )
    return wanted, "as asked for"


def _host_blocks(config: RuntimeConfig, choice: KVCacheChoice, block_bytes: int) -> int:
    wanted = config.kv_offload_bytes
    if not wanted:
        return 0
    if choice.scheme.recent:
        raise ToolkitError(
            f"{format_bytes(wanted)} of host memory for KV blocks are of no use beside {choice.scheme.recent} exact "
            "recent tokens: no sequence can begin with blocks of another",
            "Leave out the host memory or the recent tokens (--kv-residual-length 0)",
        )
    if not config.prefix_caching:
        raise ToolkitError(
            f"{format_bytes(wanted)} of host memory for KV blocks are of no use without prefix caching",
            "Turn prefix caching on, or leave the host memory out",
        )
    if wanted < block_bytes:
        raise ToolkitError(
            f"{format_bytes(wanted)} of host memory hold no KV block of {format_bytes(block_bytes)}",
            "Allow more host memory for KV blocks, or none",
        )
    return wanted // block_bytes


def explain(plan: MemoryPlan) -> list[str]:
    """One line per item, with the numbers behind it."""
    tokens = plan.num_blocks * plan.block_size
    host_tokens = plan.num_host_blocks * plan.block_size
    host = f"{plan.num_host_blocks} blocks = {host_tokens} tokens" if plan.num_host_blocks else "off"
    return [
        f"weights  {format_bytes(plan.weight_bytes)}",
        f"KV form  {plan.kv_choice.describe()}",
        *(f"         {note}" for note in plan.kv_choice.notes),
        f"KV pool  {format_bytes(plan.kv_bytes)}: {plan.num_blocks} blocks of {plan.block_size} tokens = "
        f"{tokens} tokens at {format_bytes(plan.token_bytes)} each",
        *_budget(plan),
        *_exact(plan),
        f"host KV  {format_bytes(plan.host_bytes)}: {host}",
        f"longest  {plan.max_model_len} tokens ({plan.reason})",
        *_reach(plan),
    ]


def _budget(plan: MemoryPlan) -> list[str]:
    budget = plan.budget
    if not budget.step_bytes:
        return []
    spare = f", {format_bytes(budget.spare_bytes)} are left to nobody" if budget.spare_bytes else ""
    limit = f"{format_bytes(budget.nbytes)} at most, {budget.reason}" if budget.nbytes else budget.reason
    return [f"         {limit}", f"steps    take up to {format_bytes(budget.step_bytes)} of the GPU{spare}"]


def _exact(plan: MemoryPlan) -> list[str]:
    if not plan.exact.nbytes:
        return []
    return [f"exact    {format_bytes(plan.exact.nbytes)} of it: {plan.exact} in 16 bits beside the blocks"]


def _reach(plan: MemoryPlan) -> list[str]:
    if plan.attention_window.window is None:
        return []
    held = f"{plan.blocks_per_sequence} blocks per sequence at most, whatever its length"
    return [f"reach    {plan.attention_window} tokens: {held}"]

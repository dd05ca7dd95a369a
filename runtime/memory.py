"""How much memory serving takes: weights, keys and values, and what that leaves room for. Explained, not guessed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.checkpoint.errors import ToolkitError
from runtime.config import RuntimeConfig
from runtime.reach import ALL, Reach, find_reach

if TYPE_CHECKING:
    import torch

    from runtime.model.config import DecoderConfig


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
        reach: what tokens look at; a sequence keeps blocks for nothing else.
        blocks_per_sequence: held at the same time by the longest sequence.
    """

    weight_bytes: int
    token_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    reason: str
    num_host_blocks: int = 0
    reach: Reach = ALL
    blocks_per_sequence: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.token_bytes

    @property
    def host_bytes(self) -> int:
        """Of host memory, for keys and values that were evicted from the pool."""
        return self.num_host_blocks * self.block_size * self.token_bytes

    def explain(self) -> str:
        """One line per item, with the numbers behind it."""
        tokens = self.num_blocks * self.block_size
        host_tokens = self.num_host_blocks * self.block_size
        host = f"{self.num_host_blocks} blocks = {host_tokens} tokens" if self.num_host_blocks else "off"
        return "\n".join(
            (
                f"weights  {format_bytes(self.weight_bytes)}",
                f"KV pool  {format_bytes(self.kv_bytes)}: {self.num_blocks} blocks of {self.block_size} tokens = "
                f"{tokens} tokens at {format_bytes(self.token_bytes)} each",
                f"host KV  {format_bytes(self.host_bytes)}: {host}",
                f"longest  {self.max_model_len} tokens ({self.reason})",
                *self._explain_reach(),
            )
        )

    def _explain_reach(self) -> list[str]:
        if self.reach.window is None:
            return []
        held = f"{self.blocks_per_sequence} blocks per sequence at most, whatever its length"
        return [f"reach    {self.reach} tokens: {held}"]


def plan_memory(model: DecoderConfig, weight_bytes: int, itemsize: int, config: RuntimeConfig) -> MemoryPlan:
    """Decides the number of KV blocks and the longest sequence.

    Blocks that no schedule could fill are not allocated. Without a wish for `max_model_len`, a context that the pool
    cannot hold is shortened to what it can. Where tokens look back only so far, a sequence of any length needs blocks
    for that and for one span of a prompt.

    Args:
        weight_bytes: of the prepared weights.
        itemsize: bytes of one element of keys and values.

    Raises:
        ToolkitError: a length beyond the model's context, a pool that cannot hold one sequence of that length, or an
            attention window that does not fit in the context.
    """
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    reach = find_reach(model.windows, model.context_length, config.attention_window, config.attention_sinks)
    longest, reason = longest_wanted(model, config)
    needed = reach.blocks_for(longest, config.max_span_tokens, config.block_size)
    affordable = config.num_blocks or config.kv_memory_bytes // (token_bytes * config.block_size)
    if affordable < 1 or (config.max_model_len is not None and affordable < needed):
        raise ToolkitError(
            f"a sequence of {longest} tokens needs {needed} KV blocks "
            f"({format_bytes(needed * config.block_size * token_bytes)}), and the pool has {affordable}",
            "Allow more KV memory or a shorter --max-model-len",
        )
    num_blocks = config.num_blocks or min(affordable, config.max_num_sequences * needed)
    if num_blocks < needed:
        longest, reason = num_blocks * config.block_size, f"what the KV pool holds; {reason} is {longest}"
        needed = num_blocks
    return MemoryPlan(
        weight_bytes,
        token_bytes,
        config.block_size,
        num_blocks,
        longest,
        reason,
        _host_blocks(config, token_bytes * config.block_size),
        reach,
        needed,
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


def _host_blocks(config: RuntimeConfig, block_bytes: int) -> int:
    wanted = config.host_memory_bytes
    if not wanted:
        return 0
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


def available_bytes(device: torch.device) -> int:
    """Memory that can be allocated now: of the GPU, or of the machine (what its page cache would give up included)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def format_bytes(count: int) -> str:
    """`12.3 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

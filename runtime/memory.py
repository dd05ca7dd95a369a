"""How much memory serving takes: weights, keys and values, and what that leaves room for. Explained, not guessed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.checkpoint.errors import ToolkitError
from runtime.config import RuntimeConfig

if TYPE_CHECKING:
    import torch

    from runtime.model.config import DecoderConfig


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
    """

    weight_bytes: int
    token_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    reason: str
    num_host_blocks: int = 0

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
            )
        )


def plan_memory(model: DecoderConfig, weight_bytes: int, itemsize: int, config: RuntimeConfig) -> MemoryPlan:
    """Decides the number of KV blocks and the longest sequence.

    Blocks that no schedule could fill are not allocated. Without a wish for `max_model_len`, a context that the pool
    cannot hold is shortened to what it can.

    Args:
        weight_bytes: of the prepared weights.
        itemsize: bytes of one element of keys and values.

    Raises:
        ToolkitError: a length beyond the model's context, or a pool that cannot hold one sequence of that length.
    """
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    wanted = config.max_model_len
    if wanted is not None and not 1 <= wanted <= model.context_length:
        raise ToolkitError(
            f"max_model_len={wanted} is not between 1 and the model's context of {model.context_length} tokens",
            f"Use --max-model-len {model.context_length} or less",
        )
    longest = wanted or model.context_length
    blocks_per_sequence = -(-longest // config.block_size)
    affordable = config.num_blocks or config.kv_memory_bytes // (token_bytes * config.block_size)
    if affordable < 1 or (wanted is not None and affordable < blocks_per_sequence):
        need = blocks_per_sequence * config.block_size * token_bytes
        raise ToolkitError(
            f"a sequence of {longest} tokens needs {blocks_per_sequence} KV blocks ({format_bytes(need)}), "
            f"and the pool has {affordable}",
            "Allow more KV memory or a shorter --max-model-len",
        )
    num_blocks = config.num_blocks or min(affordable, config.max_num_sequences * blocks_per_sequence)
    room = num_blocks * config.block_size
    reason = "as asked for" if wanted else "the model's context"
    if room < longest:
        longest, reason = room, f"what the KV pool holds; the model's context is {model.context_length}"
    host_blocks = _host_blocks(config, token_bytes * config.block_size)
    return MemoryPlan(weight_bytes, token_bytes, config.block_size, num_blocks, longest, reason, host_blocks)


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

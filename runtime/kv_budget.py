"""How much memory keys and values get: what was asked for, a default, or what a GPU has left. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.checkpoint.errors import ToolkitError
from runtime.config import RuntimeConfig
from runtime.free_memory import format_bytes
from runtime.speculative.ngram import CHAINS, TREES

CPU_BYTES = 512 * 2**20
"""On a CPU, whose memory belongs to others too."""
SPARE_SHARE, LEAST_SPARE_BYTES = 50, 512 * 2**20
"""One part in so many of a GPU's memory, and so many bytes at least, are left to nobody: allocators round up."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Memory for keys and values.

    Attributes:
        nbytes: at most.
        reason: why so much.
        step_bytes: beside it, for what a GPU computes.
        spare_bytes: for nobody.
    """

    nbytes: int
    reason: str
    step_bytes: int = 0
    spare_bytes: int = 0


NO_BUDGET = KVBudget(0, "as many blocks as asked for")


def find_budget(config: RuntimeConfig, step_bytes: int, free: int | None) -> KVBudget:
    """Memory for keys and values.

    Args:
        step_bytes: that the largest step takes on a GPU.
        free: of a GPU, beside the weights; None on a CPU.

    Raises:
        ToolkitError: nothing is left for them.
    """
    beside = 0 if free is None else step_bytes
    if config.num_blocks:
        return replace(NO_BUDGET, step_bytes=beside)
    if config.kv_memory_bytes is not None:
        return KVBudget(config.kv_memory_bytes, "as asked for", beside)
    if free is None:
        return KVBudget(CPU_BYTES, "the default on a CPU")
    spare = max(LEAST_SPARE_BYTES, free // SPARE_SHARE)
    left = free - step_bytes - spare
    if left <= 0:
        raise ToolkitError(
            f"{format_bytes(free)} of the GPU are free beside the weights, and steps take {format_bytes(step_bytes)}",
            "Allow fewer --max-sequences, use a smaller checkpoint, or say --kv-memory to try how little does",
        )
    reason = f"what {format_bytes(free)} beside the weights leave"
    if drafts_with_model(config):
        return KVBudget(left // 2, f"half of {reason}; the other half is the draft model's", step_bytes, spare)
    return KVBudget(left, reason, step_bytes, spare)


def drafts_with_model(config: RuntimeConfig) -> bool:
    """Whether guesses come from a model, which needs weights and a KV pool of its own."""
    return bool(config.speculate) and config.speculate not in (CHAINS, TREES)

"""A plan of memory in words. No torch."""

from __future__ import annotations

from runtime.free_memory import format_bytes
from runtime.memory import MemoryPlan


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
    if plan.reach.window is None:
        return []
    held = f"{plan.blocks_per_sequence} blocks per sequence at most, whatever its length"
    return [f"reach    {plan.reach} tokens: {held}"]

"""The block table that a sequence starts with: what is known of its tokens, and what has to be had. No torch."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from runtime.blocks import BlockPool
from runtime.reach import RELEASED, Reach


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A block table in the making; nothing is taken yet.

    Attributes:
        table: ids of known blocks; elsewhere `RELEASED`.
        missing: entries that need a new block, in order.
        saved: hashes of blocks in host memory that fill the first of these.
        source: known block whose first tokens the last new block gets, because only its last token is to be computed.
        num_computed_tokens: tokens whose keys and values are known then.
    """

    table: list[int]
    missing: list[int]
    saved: list[bytes]
    source: int | None
    num_computed_tokens: int


def plan_table(pool: BlockPool, reach: Reach, hashes: abc.Sequence[bytes], num_tokens: int, span: int) -> TablePlan:
    """Finds what is known of a sequence of `num_tokens` tokens.

    The last token is computed in any case, since its logits are wanted. When even its block is known, that block serves
    as a source to copy the tokens before it from.

    Args:
        hashes: chain of the full blocks.
        span: tokens of the sequence that one step computes at most.
    """
    size = pool.block_size
    known = _known_blocks(pool, reach, hashes, num_tokens)
    num_computed = min(len(known) * size, num_tokens - 1)
    hidden = reach.hidden_blocks(num_computed, size)
    last = (num_tokens - 1) // size
    source = known[last] if len(known) > last else None
    kept = known[:last]
    table, missing = [], []
    for index in range(pool.blocks_for(reach.table_tokens(num_tokens, num_computed, span))):
        block_id = kept[index] if index < len(kept) else None
        if block_id is None and index not in hidden:
            missing.append(index)
        table.append(RELEASED if block_id is None or index in hidden else block_id)
    saved = [hashes[index] for index in missing if index < len(known) and known[index] is None]
    return TablePlan(table, missing, saved, source, num_computed)


def _known_blocks(pool: BlockPool, reach: Reach, hashes: abc.Sequence[bytes], num_tokens: int) -> list[int | None]:
    """The longest prefix that can be gone on from: block ids, and None where host memory has a block, or where it is
    out of reach and nobody has it."""
    if reach.window is None:
        found = pool.match(hashes)
        return [*found, *[None] * len(pool.tier.find(hashes[len(found) :]))]
    blocks = [pool.find(block_hash) for block_hash in hashes]
    known = [block is not None or name in pool.tier for block, name in zip(blocks, hashes, strict=True)]
    return blocks[: reach.usable_prefix(known, num_tokens, pool.block_size)]

"""How far back tokens look, and what follows for KV blocks: which are out of reach, how many are needed. No torch.

Keys and values that no later token looks at need no memory. Two kinds of models have an limited window:

* every layer has a sliding window (Mistral 7B v0.1). Models that mix full and windowed layers keep all blocks, because
  a block holds the keys and values of all layers;
* any model with attention sinks (StreamingLLM, arXiv:2309.17453, section 3.2): it sees the first `sinks` and the last
  `window` tokens, at the positions they have among those.

In a block table an entry whose block was given back is `RELEASED`, so that positions keep their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compress.common.errors import ToolkitError

RELEASED = -1
"""Stands in a block table for a block that is out of reach and was given back."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """What a token looks at.

    Attributes:
        window: so many last tokens, itself included; None is all.
        sinks: so many first tokens, beside the window.
    """

    window: int | None = None
    sinks: int = 0

    def __str__(self) -> str:
        if self.window is None:
            return "all before them"
        return f"the first {self.sinks} and the last {self.window}" if self.sinks else f"the last {self.window}"

    def evictable_blocks(self, position: int, block_size: int) -> range:
        """Entries of a block table that no token at `position` or behind it looks at."""
        if self.window is None:
            return range(0)
        hidden = range(-(-self.sinks // block_size), (position - self.window + 1) // block_size)
        return hidden if hidden else range(0)

    def table_tokens(self, num_tokens: int, num_computed_tokens: int, step: int) -> int:
        """Tokens that the block table of a sequence covers: all, or as many as it may hold blocks for.

        Args:
            step: tokens of one sequence that are computed together at most.
        """
        if self.window is None:
            return num_tokens
        return min(num_tokens, max(self.sinks + self.window, num_computed_tokens) + step)

    def blocks_for(self, num_tokens: int, step: int, block_size: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds at the same time at most; `step` as above."""
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        # The window of the step's first token and the rest of the step, where they touch the most blocks.
        rolling = (self.window + step + block_size - 3) // block_size + 1
        start = -(-(self.sinks + self.window + step) // block_size)
        return min(blocks, max(start, -(-self.sinks // block_size) + rolling))

    def usable_prefix(self, known: Sequence[bool], num_tokens: int, block_size: int) -> int:
        """Blocks of the longest prefix after which the next token, or the last one, finds all that it looks at.

        Args:
            known: for each full block of a sequence of `num_tokens` tokens whether its keys and values are known.
        """
        num_leading = next((index for index, is_known in enumerate(known) if not is_known), len(known))
        begin = len(known)  # blocks [begin, end) are known
        for end in range(len(known), num_leading, -1):
            begin = min(begin, end)
            while begin > 0 and known[begin - 1]:
                begin -= 1
            hidden = self.evictable_blocks(min(end * block_size, num_tokens - 1), block_size)
            if hidden.start <= num_leading and begin <= hidden.stop:
                return end
        return num_leading


FULL_ATTENTION = AttentionWindow()
"""Every token before it, as in ordinary models."""


def held_blocks(block_ids: Iterable[int]) -> list[int]:
    """The blocks of a table that were not given back."""
    return [block_id for block_id in block_ids if block_id != RELEASED]


def resolve_attention_window(
    windows: Sequence[int | None], context_length: int, attention_window: int | None, attention_sinks: int
) -> AttentionWindow:
    """The reach of a model whose layers have these sliding windows, when it is served with these wishes.

    Args:
        context_length: of the model; sinks and window together must lie inside of it.

    Raises:
        ToolkitError: sinks without a window, or more tokens than the model can look at.
    """
    own = [window for window in windows if window is not None]
    if attention_window is None:
        if attention_sinks:
            remedy = "Add --attention-window, for example --attention-window 1024"
            raise ToolkitError(f"{attention_sinks} attention sinks are asked for, and no window beside them", remedy)
        return AttentionWindow(max(own)) if own and len(own) == len(windows) else FULL_ATTENTION
    longest = min([context_length - attention_sinks, *own])
    if attention_window < 1 or attention_sinks < 0 or attention_window > longest:
        raise ToolkitError(
            f"{attention_sinks} attention sinks and a window of {attention_window} tokens do not fit in the model's "
            f"context of {context_length} tokens" + (f" and its own window of {min(own)}" if own else ""),
            f"Use --attention-window {longest} or less" if longest > 0 else "Use fewer --attention-sinks",
        )
    return AttentionWindow(attention_window, attention_sinks)

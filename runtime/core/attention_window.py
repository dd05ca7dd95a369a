"""Attention windows, and the pages that follow from them: which can be evicted, how many are needed. No torch.

Keys and values that no later token attends to need no memory. This holds for two kinds of models:

* every layer has a sliding window (Mistral 7B v0.1). Models that mix full and windowed layers keep all blocks, because
  a block holds the keys and values of all layers;
* any model with attention sinks (StreamingLLM, arXiv:2309.17453, section 3.2): a token attends to the first `sinks` and
  the last `window` tokens, at the positions they have among those.

In a block table, `RELEASED` replaces a block that was returned to the pool, so that positions keep their entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compress.common.errors import ToolkitError

RELEASED = -1
"""Entry of a block table whose block is outside the window and was returned to the pool."""


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Tokens that a token attends to.

    Attributes:
        window: number of last tokens, including the token itself; None is all.
        sinks: number of first tokens in addition to the window.
    """

    window: int | None = None
    sinks: int = 0

    def __str__(self) -> str:
        if self.window is None:
            return "all before them"
        return f"the first {self.sinks} and the last {self.window}" if self.sinks else f"the last {self.window}"

    def evictable_blocks(self, position: int, block_size: int) -> range:
        """Returns the entries of a block table that are outside the window of all tokens from `position` on."""
        if self.window is None:
            return range(0)
        evictable = range(-(-self.sinks // block_size), (position - self.window + 1) // block_size)
        return evictable if evictable else range(0)

    def table_tokens(self, num_tokens: int, num_computed_tokens: int, step: int) -> int:
        """Returns the number of tokens that the block table of a sequence covers.

        Args:
            step: maximum number of tokens of one sequence per step.
        """
        if self.window is None:
            return num_tokens
        return min(num_tokens, max(self.sinks + self.window, num_computed_tokens) + step)

    def blocks_for(self, num_tokens: int, step: int, block_size: int) -> int:
        """Returns the maximum number of blocks that a sequence of `num_tokens` tokens holds; `step` as in
        `table_tokens`.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        # The window of the step's first token and the rest of the step, at the offset that touches the most blocks. A
        # decode keeps the window of the token before it.
        step = max(step, 2)
        rolling = (self.window + step + block_size - 3) // block_size + 1
        start = -(-(self.sinks + self.window + step) // block_size)
        return min(blocks, max(start, -(-self.sinks // block_size) + rolling))

    def usable_prefix(self, known: Sequence[bool], num_tokens: int, block_size: int) -> int:
        """Returns the number of blocks in the longest prefix that holds everything the next (or last) token attends to.

        Args:
            known: whether each full block of a sequence of `num_tokens` tokens is cached.
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
"""Window of full causal attention."""
NO_KEYS = AttentionWindow(1)
"""Block tables of models without keys and values cover no more."""


def held_blocks(block_ids: Iterable[int]) -> list[int]:
    """Returns the blocks of a table without `RELEASED` entries."""
    return [block_id for block_id in block_ids if block_id != RELEASED]


def resolve_attention_window(
    windows: Sequence[int | None], context_length: int, attention_window: int | None, attention_sinks: int
) -> AttentionWindow:
    """Returns the attention window of a model with these options.

    Args:
        windows: sliding windows of its layers; None is full attention.
        context_length: context length of the model, which bounds sinks and window together.

    Raises:
        ToolkitError: sinks without a window, or sinks and window that exceed the model's context.
    """
    own = [window for window in windows if window is not None]
    if attention_window is None:
        if attention_sinks:
            remedy = "Add --attention-window, for example --attention-window 1024"
            raise ToolkitError(f"{attention_sinks} attention sinks need an attention window", remedy)
        return AttentionWindow(max(own)) if own and len(own) == len(windows) else FULL_ATTENTION
    longest = min([context_length - attention_sinks, *own])
    if attention_window < 1 or attention_sinks < 0 or attention_window > longest:
        raise ToolkitError(
            f"{attention_sinks} attention sinks and a window of {attention_window} tokens do not fit in the model's "
            f"context of {context_length} tokens" + (f" and its own window of {min(own)}" if own else ""),
            f"Use --attention-window {longest} or less" if longest > 0 else "Use fewer --attention-sinks",
        )
    return AttentionWindow(attention_window, attention_sinks)

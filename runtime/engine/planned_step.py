"""A step plan under construction: its entries, and the remaining tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.core.request import Sequence
from runtime.core.step import BlockCopy, ScheduledSequence
from runtime.engine.kv_cache_manager import TakenBlocks


@dataclass(slots=True)
class PlannedStep:
    """Step plan under construction.

    Attributes:
        budget: number of remaining tokens.
        turns: running sequences that have not been planned; the last one is the next to be preempted.
        taken: block moves of sequences admitted in this step, by sequence id.
        copies: other copies of blocks.
        prompts: entries with prompt tokens, by sequence id.
        shares: remaining prompt tokens of each client; None is no limit.
    """

    budget: int
    turns: list[Sequence] = field(default_factory=list)
    entries: list[ScheduledSequence] = field(default_factory=list)
    taken: dict[str, TakenBlocks] = field(default_factory=dict)
    copies: list[BlockCopy] = field(default_factory=list)
    prompts: dict[str, ScheduledSequence] = field(default_factory=dict)
    shares: dict[str, int] | None = None

    def add(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        entry = ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens)
        self.entries.append(entry)
        self.budget -= num_tokens
        return entry

    def room(self, client: str) -> int:
        """Returns the maximum prompt tokens of a client that fit in the step."""
        return self.budget if self.shares is None else min(self.budget, self.shares[client])

    def add_chunk(self, sequence: Sequence, longest: int) -> None:
        """Adds as many tokens of a prompt as fit, up to a total of `longest`."""
        entry = self.prompts.get(sequence.id) or self.add(sequence, 0)
        self.prompts[sequence.id] = entry
        rest = min(sequence.num_tokens - sequence.num_computed_tokens, longest) - entry.num_tokens
        count = min(rest, self.room(sequence.client))
        entry.num_tokens += count
        self.budget -= count
        if self.shares is not None:
            self.shares[sequence.client] -= count

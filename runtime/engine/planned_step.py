"""A step plan under construction: its entries, the remaining tokens, and adapters that fit. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from runtime.core.request import Sequence
from runtime.core.step import BlockCopy, ScheduledSequence
from runtime.engine.kv_cache_manager import TakenBlocks

ROUNDING = 1e-9
"""Share of a token by which sums of seconds may be off."""


def one_token(sequence: Sequence) -> float:
    """Returns the cost of a prompt token if tokens are what is shared."""
    return 1


@dataclass(slots=True)
class PlannedStep:
    """Step plan under construction.

    Attributes:
        budget: number of remaining tokens.
        prompt_budget: remaining cost of prompts, in units of `cost_of`: tokens, or seconds.
        num_prompt_tokens: remaining prompt tokens, whatever they cost.
        cost_of: returns the cost of the next prompt token of a sequence.
        decode_cost: cost of a decoded token in the same units.
        turns: running sequences that have not been planned; the last one is the next to be preempted.
        taken: block moves of sequences admitted in this step, by sequence id.
        copies: other copies of blocks.
        prompts: entries with prompt tokens, by sequence id.
        shares: remaining cost of prompts of each client; None means no limit.
    """

    budget: int
    prompt_budget: float = 0
    num_prompt_tokens: int = 0
    cost_of: Callable[[Sequence], float] = one_token
    decode_cost: float = 1
    turns: list[Sequence] = field(default_factory=list)
    entries: list[ScheduledSequence] = field(default_factory=list)
    taken: dict[str, TakenBlocks] = field(default_factory=dict)
    copies: list[BlockCopy] = field(default_factory=list)
    prompts: dict[str, ScheduledSequence] = field(default_factory=dict)
    shares: dict[str, float] | None = None

    def add(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        entry = ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens)
        self.entries.append(entry)
        self.budget -= num_tokens
        return entry

    def room(self, sequence: Sequence) -> int:
        """Returns the maximum prompt tokens of a sequence that fit in the step; at least one for the first prompt of
        each client, as far as the token budget allows."""
        cost = self.prompt_budget if self.shares is None else self.shares[sequence.client]
        count = min(int(cost / self.cost_of(sequence) + ROUNDING), self.num_prompt_tokens)
        is_first = all(entry.sequence.client != sequence.client for entry in self.prompts.values())
        return min(self.budget, max(count, is_first))

    def add_chunk(self, sequence: Sequence, longest: int) -> None:
        """Adds as many tokens of a prompt as fit, up to a total of `longest`; at least one if it had none."""
        entry = self.prompts.get(sequence.id)
        least, room = (1, self.room(sequence)) if entry is None else (0, self.room(sequence))
        entry = self.prompts[sequence.id] = entry or self.add(sequence, 0)
        rest = min(sequence.num_tokens - sequence.num_computed_tokens, longest) - entry.num_tokens
        count = max(least, min(rest, room))
        entry.num_tokens += count
        self.budget -= count
        self.num_prompt_tokens -= count
        cost = count * self.cost_of(sequence)
        self.prompt_budget -= cost
        if self.shares is not None:
            self.shares[sequence.client] -= cost


def has_place(sequence: Sequence, running: Iterable[Sequence], max_adapters: int) -> bool:
    """Returns whether the adapter of a sequence is among those of the running ones, or fits next to them."""
    adapter = sequence.request.adapter
    if adapter is None:
        return True
    active = {each.request.adapter.digest for each in running if each.request.adapter is not None}
    return len(active | {adapter.digest}) <= max_adapters


def with_places(waiting: Iterable[Sequence], running: Iterable[Sequence], max_adapters: int) -> Iterator[Sequence]:
    """Yields the waiting sequences that are not held and whose adapters have places; after one without, those without
    an adapter only: the places must become free for it."""
    is_free = True
    for sequence in waiting:
        if sequence.is_held:
            continue
        if sequence.request.adapter is None:
            yield sequence
        elif is_free:
            is_free = has_place(sequence, running, max_adapters)
            if is_free:
                yield sequence

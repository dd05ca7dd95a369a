"""Steps of several ranks: what the first one tells others, and the memory that all have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from compress.common.errors import ToolkitError
from runtime.core.adapter import Adapter
from runtime.core.memory_plan import MemoryPlan
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.parallel.group import Group

UNSAMPLED = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a sequence, as ranks that sample nothing compute it.

    Attributes:
        token_ids: known tokens of the span.
        draft_token_ids, draft_parents: those of the sequence, after its known tokens.
        block_ids: block table of the sequence.
        adapter: digest; "" for none.
    """

    id: str
    start: int
    num_tokens: int
    token_ids: list[int]
    draft_token_ids: list[int]
    draft_parents: list[int]
    block_ids: list[int]
    state_read: int
    state_writes: tuple[tuple[int, int], ...]
    adapter: str

    @classmethod
    def of(cls, entry: ScheduledSequence) -> Span:
        """Takes out of a scheduled sequence what other ranks read. Its tokens must be known."""
        sequence, count = entry.sequence, entry.num_draft_tokens
        return cls(
            sequence.id,
            entry.start,
            entry.num_tokens,
            sequence.token_ids[entry.start : entry.start + entry.num_tokens],
            sequence.draft_token_ids[:count],
            sequence.draft_parents[:count],
            sequence.block_ids,
            entry.state_read,
            entry.state_writes,
            "" if sequence.request.adapter is None else sequence.request.adapter.digest,
        )

    def entry(self, adapters: Mapping[str, Adapter | None]) -> ScheduledSequence:
        """Makes a scheduled sequence that samples nothing; tokens before the span, which nothing reads, are 0."""
        sequence = Sequence(
            Request(self.id, (), UNSAMPLED, 0, adapter=adapters.get(self.adapter)),
            [0] * self.start + self.token_ids,
            block_ids=self.block_ids,
            draft_token_ids=self.draft_token_ids,
            draft_parents=self.draft_parents,
        )
        return ScheduledSequence(sequence, self.start, self.num_tokens, self.state_read, self.state_writes)


class KeptAdapters:
    """Adapters that ranks other than the first keep, by digest. All ranks know the same ones, the first without them.

    Args:
        limit: how many are kept; more if one plan has more.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, OrderedDict[str, Adapter | None]()

    def lacking(self, adapters: Iterable[Adapter | None]) -> dict[str, Adapter]:
        """Returns those that are not kept."""
        return {each.digest: each for each in adapters if each is not None and each.digest not in self._kept}

    def keep(self, spans: Iterable[Span], given: Mapping[str, Adapter | None]) -> Mapping[str, Adapter | None]:
        """Keeps those of a plan, some of which are given; drops others that were used longest ago."""
        used = list(dict.fromkeys(span.adapter for span in spans if span.adapter))
        for digest in used:
            self._kept[digest] = given.get(digest) or self._kept.get(digest)
            self._kept.move_to_end(digest)
        while len(self._kept) > max(self._limit, len(used)):
            self._kept.popitem(last=False)
        return self._kept


@dataclass(frozen=True, slots=True)
class StepTold:
    """A plan for other ranks.

    Attributes:
        moves: the plan without its entries.
        adapters: those of the plan that other ranks do not keep, by digest.
    """

    moves: StepPlan
    spans: tuple[Span, ...]
    adapters: Mapping[str, Adapter]

    def plan(self, kept: KeptAdapters) -> StepPlan:
        """Makes the plan that a rank submits to its runner."""
        adapters = kept.keep(self.spans, self.adapters)
        return replace(self.moves, entries=tuple(span.entry(adapters) for span in self.spans))


def tell_plan(group: Group | None, kept: KeptAdapters, plan: StepPlan) -> None:
    """Sends a plan from the first rank to all others, if there are any."""
    if group is None or not group.is_first:
        return
    spans = tuple(map(Span.of, plan.entries))
    lacking = kept.lacking(entry.sequence.request.adapter for entry in plan.entries)
    kept.keep(spans, {})
    group.others.tell(StepTold(replace(plan, entries=()), spans, lacking))


def share_plan(plan: MemoryPlan, group: Group | None) -> MemoryPlan:
    """Returns the plan with as many blocks and slots as the rank with the fewest has.

    Raises:
        ToolkitError: tokens that stay unquantized, which ranks do not keep.
    """
    if group is None:
        return plan
    if plan.exact.nbytes:
        raise ToolkitError(
            f"{plan.exact} stay unquantized, which ranks that share a model do not keep",
            "Use --kv-sinks 0 --kv-residual-length 0, or leave out --tensor-parallel-size",
        )
    num_blocks, states = group.least(plan.num_blocks), plan.states
    is_short = num_blocks < plan.blocks_per_sequence
    return replace(
        plan,
        num_blocks=num_blocks,
        num_host_blocks=group.least(plan.num_host_blocks),
        blocks_per_sequence=min(num_blocks, plan.blocks_per_sequence),
        max_model_len=num_blocks * plan.block_size if is_short else plan.max_model_len,
        states=replace(
            states, num_slots=group.least(states.num_slots), num_host_slots=group.least(states.num_host_slots)
        ),
    )

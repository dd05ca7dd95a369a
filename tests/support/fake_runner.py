"""A runner without a model: it really stores something per KV slot, and the next token depends on all it reads back.

A wrong block table, a stale block, a missing copy or a token computed at the wrong place changes the output.
"""

import random
from array import array
from collections.abc import Sequence as TokenIds
from dataclasses import replace
from hashlib import blake2b
from zlib import crc32

from runtime.core.attention_window import FULL_ATTENTION, RELEASED, AttentionWindow
from runtime.core.draft_states import StateCosts
from runtime.core.draft_tree import find_child, grow_tree, paths
from runtime.core.request import Sequence, TokenLogprobs
from runtime.core.step import (
    KNOWN,
    NO_STATE,
    ComputedStep,
    SampledToken,
    ScheduledSequence,
    StepOutput,
    StepPlan,
    SubmittedStep,
)

VOCAB_SIZE = 50
Slot = tuple[int, int]


def next_token(history: list[Slot], seed: int) -> int:
    """A token that depends on every (token, position) before it."""
    flat = array("q", [number for slot in history for number in slot]).tobytes()
    digest = blake2b(flat + seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def visible_positions(length: int, attention_window: AttentionWindow) -> list[int]:
    """Tokens that the last of `length` tokens attends to."""
    first = 0 if attention_window.window is None else max(0, length - attention_window.window)
    return [*range(min(attention_window.sinks, first)), *range(first, length)]


def expected_tokens(
    prompt: TokenIds[int],
    max_tokens: int,
    seed: int = 0,
    end_token_ids: frozenset[int] = frozenset(),
    attention_window: AttentionWindow = FULL_ATTENTION,
) -> list[int]:
    """Expected tokens of a request, computed without engine, blocks or batch."""
    history = [(token, position) for position, token in enumerate(prompt)]
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in end_token_ids):
        output.append(
            next_token([history[position] for position in visible_positions(len(history), attention_window)], seed)
        )
        history.append((output[-1], len(history)))
    return output


class FakeRunner:
    """Implements `runtime.core.step.Runner`.

    Attributes:
        broken_ids: requests whose logits are not finite.
        failure: raised by the next `execute`.
        plans: how many tokens each step had, by request id.
        script: tokens that every request gets instead of those computed; for tests of text.
        overlaps: steps can be continued before they are read, as on a GPU. They are computed when they are submitted,
            and what goes wrong shows when they are read.
        undecided: share of the tokens of such steps that cannot be decided once the next one is submitted.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        eos_token_ids: frozenset[int] = frozenset(),
        num_host_blocks: int = 0,
        attention_window: AttentionWindow = FULL_ATTENTION,
        shares_blocks: bool = True,
        num_state_slots: int = 0,
        num_host_states: int = 0,
        state_costs: StateCosts = StateCosts(write_bytes=1, token_bytes=100),
    ) -> None:
        self.shares_blocks = shares_blocks
        self.num_state_slots = num_state_slots
        self._states: list[tuple[int, ...] | None] = [None] * num_state_slots
        self.num_host_states, self.state_costs = num_host_states, state_costs
        self._host_states: list[tuple[int, ...] | None] = [None] * num_host_states
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.max_model_len = max_model_len
        self.attention_window = attention_window
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = eos_token_ids
        self.broken_ids: set[str] = set()
        self.failure: Exception | None = None
        self.plans: list[dict[str, int]] = []
        self.script: list[int] = []
        self.overlaps = False
        self.undecided = 0.0
        self.latest: FakeStep | None = None
        self._slots: list[Slot | None] = [None] * (num_blocks * block_size)
        self._host: list[list[Slot | None]] = [[]] * num_host_blocks

    def submit(self, plan: StepPlan) -> SubmittedStep:
        sources = [entry.source_row for entry in plan.entries if entry.source_row != KNOWN]
        assert not sources or (self.latest is not None and len(set(sources)) == len(sources))
        if not self.overlaps or any(entry.num_draft_tokens for entry in plan.entries):
            assert not sources
            self.latest = None
            return ComputedStep(self.execute(plan))
        output: StepOutput | Exception
        try:
            output = self.execute(plan)
        except Exception as error:
            output = error
        self.latest = FakeStep(self, plan, output)
        return self.latest

    def execute(self, plan: StepPlan) -> StepOutput:
        self.plans.append({entry.sequence.id: entry.num_tokens for entry in plan.entries})
        if self.failure is not None:
            failure, self.failure = self.failure, None
            for entry in plan.entries:
                for _, slot in entry.state_writes:
                    self._states[slot] = None
            for offload in plan.state_offloads:
                self._host_states[offload.slot] = None
            raise failure
        assert all(entry.num_tokens >= 1 for entry in plan.entries)
        self._move(plan)
        self._check_disjoint(plan)
        if self.num_state_slots:
            self._move_states(plan)
            self._advance_states(plan)
        for entry in plan.entries:
            known, draft = self._num_known(entry), entry.sequence.draft_token_ids
            for position in range(entry.start, min(known, entry.start + entry.num_tokens)):
                self._slots[self._slot(entry, position)] = (self._token(entry, position), position)
            for number, path in enumerate(paths(entry.draft_parents)):
                self._slots[self._slot(entry, known + number)] = (draft[number], known + len(path) - 1)
        return StepOutput({e.sequence.id: self._verify(e) for e in plan.entries if e.samples})

    def _num_known(self, entry: ScheduledSequence) -> int:
        """Tokens before the drafts, the one included that only the step before knows."""
        return entry.sequence.num_tokens if entry.source_row == KNOWN else entry.start + 1

    def _token(self, entry: ScheduledSequence, position: int) -> int:
        """A token of the span; what the step before drew is taken from it, and anything where that failed."""
        if entry.source_row == KNOWN:
            return entry.sequence.token_ids[position]
        assert entry.sequence.num_tokens == position, "the token is known"
        assert self.latest is not None
        return max(0, self.latest.drawn[entry.source_row])

    def _slot(self, entry: ScheduledSequence, position: int) -> int:
        block_id = entry.sequence.block_ids[position // self.block_size]
        assert block_id != RELEASED, f"{entry.sequence.id} needs position {position}, and its block was given back"
        return block_id * self.block_size + position % self.block_size

    def _move(self, plan: StepPlan) -> None:
        """Copies all at once, as a gather and a scatter: their order among themselves must not matter."""
        assert len({offload.slot for offload in plan.offloads}) == len(plan.offloads)
        written = [copy.target for copy in plan.copies] + [restore.block for restore in plan.restores]
        planned = {block_id for entry in plan.entries for block_id in entry.sequence.block_ids}
        assert len(set(written)) == len(written), "a block is written twice"
        assert planned.issuperset(written), "a block is written for a sequence that is not in the plan"
        size = self.block_size
        for offload in plan.offloads:
            self._host[offload.slot] = self._slots[offload.block * size : (offload.block + 1) * size]
            assert None not in self._host[offload.slot], "only full blocks are worth saving"
        read = []
        for copy in plan.copies:
            start = copy.source * self.block_size
            read.append((copy.target * self.block_size, self._slots[start : start + copy.num_tokens]))
        for start, slots in read:
            self._slots[start : start + len(slots)] = slots
        for restore in plan.restores:
            assert self._host[restore.slot], "a restored slot was saved before"
            self._slots[restore.block * size : (restore.block + 1) * size] = self._host[restore.slot]

    def _check_disjoint(self, plan: StepPlan) -> None:
        """Checks that no block is written that another sequence of the plan reads."""
        for entry in plan.entries:
            first, last = entry.start // self.block_size, (entry.start + entry.num_tokens - 1) // self.block_size
            written = set(entry.sequence.block_ids[first : last + 1])
            for other in plan.entries:
                if other is not entry and written & set(other.sequence.block_ids):
                    raise AssertionError(f"{entry.sequence.id} writes into blocks of {other.sequence.id}")

    def _move_states(self, plan: StepPlan) -> None:
        assert len({offload.slot for offload in plan.state_offloads}) == len(plan.state_offloads)
        read = [entry.state_read for entry in plan.entries]
        for offload in plan.state_offloads:
            assert self._states[offload.block] is not None, "a slot without a state is saved"
            self._host_states[offload.slot] = self._states[offload.block]
        for restore in plan.state_restores:
            assert read.count(restore.block) == 1, "a restored state is not that of one sequence"
            self._states[restore.block] = self._host_states[restore.slot]

    def _advance_states(self, plan: StepPlan) -> None:
        """A state is all tokens so far. Reads all before it writes, and allows no slot to be written twice, nor one
        that another sequence reads."""
        written = [slot for entry in plan.entries for _, slot in entry.state_writes]
        assert len(set(written)) == len(written), "a slot is written twice"
        states: dict[int, tuple[int, ...]] = {}
        for entry in plan.entries:
            others = {each.state_read for each in plan.entries if each is not entry}
            assert others.isdisjoint(slot for _, slot in entry.state_writes), "a slot is written that another reads"
            before = () if entry.state_read == NO_STATE else self._states[entry.state_read]
            unread = [] if entry.source_row == KNOWN else [self._token(entry, entry.start)]
            tokens = (*entry.sequence.token_ids, *unread, *entry.sequence.draft_token_ids)
            assert before == tokens[: entry.start], "the state is that of other tokens"
            offsets = [offset for offset, _ in entry.state_writes]
            assert offsets == sorted(set(offsets))
            assert offsets[-1] == entry.num_tokens - 1
            states |= {slot: tokens[: entry.start + offset + 1] for offset, slot in entry.state_writes}
        for slot, state in states.items():
            self._states[slot] = state

    def _verify(self, entry: ScheduledSequence) -> list[SampledToken]:
        """Token after the given ones, and after each draft token of a branch as long as they are accepted. The accepted
        branch is appended to the tokens."""
        parents, path = entry.draft_parents, []
        draft, known = entry.sequence.draft_token_ids[: len(parents)], self._num_known(entry)
        drawn = [self._sample(entry, path)]
        while (guess := find_child(draft, parents, path[-1] if path else -1, drawn[-1].token_id)) is not None:
            path.append(guess)
            drawn.append(self._sample(entry, path))
        for place, number in enumerate(path):
            self._slots[self._slot(entry, known + place)] = self._slots[self._slot(entry, known + number)]
        return drawn

    def _sample(self, entry: ScheduledSequence, path: list[int]) -> SampledToken:
        """The token after the known ones and a branch of draft tokens."""
        sequence, known, num_guesses = entry.sequence, self._num_known(entry), len(path)
        if sequence.id in self.broken_ids:
            return SampledToken(-1, error="logits are not finite")
        visible = visible_positions(known + num_guesses, self.attention_window)
        places = [*range(known), *(known + number for number in path)]
        history = [self._slots[self._slot(entry, places[position])] for position in visible]
        if any(slot is None for slot in history):
            raise AssertionError(f"{sequence.id} reads a slot that was never written")
        if self.script:
            return SampledToken(self.script[known - sequence.num_prompt_tokens + num_guesses])
        token = next_token([slot for slot in history if slot is not None], sequence.request.seed)
        wants = sequence.request.sampling.logprobs is not None
        return SampledToken(token, TokenLogprobs(-0.5, ((token, -0.5),)) if wants else None)


class FakeStep:
    """A step of a `FakeRunner` that is read late."""

    feeds_next = True

    def __init__(self, runner: FakeRunner, plan: StepPlan, output: StepOutput | Exception) -> None:
        self.runner, self.plan, self.output = runner, plan, output
        tokens = {} if isinstance(output, Exception) else output.tokens
        self.drawn = [tokens[e.sequence.id][0].token_id if e.sequence.id in tokens else 0 for e in plan.entries]

    def result(self) -> StepOutput:
        if isinstance(self.output, Exception):
            raise self.output
        if self.runner.latest is self:
            return self.output
        tokens = self.output.tokens
        late = [entry for entry in self.plan.entries if entry.samples and self._is_decided(entry)]
        return replace(self.output, tokens={entry.sequence.id: tokens[entry.sequence.id] for entry in late})

    def _is_decided(self, entry: ScheduledSequence) -> bool:
        return crc32(f"{entry.sequence.id} {entry.start}".encode()) >= self.runner.undecided * 2**32


class FakeDrafter:
    """Guesses what a `FakeRunner` will say: right with some probability, else anything; as many as it likes."""

    def __init__(
        self, num_guesses: int, accuracy: float, seed: int = 0, attention_window: AttentionWindow = FULL_ATTENTION
    ) -> None:
        self.num_guesses, self.accuracy, self.attention_window = num_guesses, accuracy, attention_window
        self._chance = random.Random(seed)

    def propose(self, wishes: TokenIds[tuple[Sequence, int]]) -> None:
        for sequence, count in wishes:
            count = self._chance.randint(0, min(count, self.num_guesses))
            right = expected_tokens(
                sequence.token_ids, count, sequence.request.seed, attention_window=self.attention_window
            )
            sequence.draft_token_ids = [
                token if self._chance.random() < self.accuracy else self._chance.randrange(VOCAB_SIZE)
                for token in right
            ]


class FakeTreeDrafter(FakeDrafter):
    """Several such guesses at once, of different lengths, where some have others' beginnings."""

    def propose(self, wishes: TokenIds[tuple[Sequence, int]]) -> None:
        branches: dict[Sequence, list[list[int]]] = {sequence: [] for sequence, _ in wishes}
        for _ in range(3):
            super().propose(wishes)
            for sequence, _ in wishes:
                branches[sequence].append(sequence.draft_token_ids)
        for sequence, _ in wishes:
            sequence.draft_token_ids, sequence.draft_parents = grow_tree(branches[sequence], 16)

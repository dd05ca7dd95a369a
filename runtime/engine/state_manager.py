"""Recurrent states of sequences: initial states, slots that a step writes, and saved states. No torch.

A running sequence continues from one slot, `Sequence.state_slot`; before its first step that is a saved state, or none.
A step writes the state after a sequence's last token to the same slot, or to another slot if the first is saved or read
by other sequences. Saving therefore needs no copy, only a slot.

States are saved at block boundaries only, because the prefix cache finds whole blocks: at the end of a prompt; where a
prompt diverges from cached ones (a junction); at the end of each message of a conversation, which may be edited or
answered again; every `interval` tokens; and after the last full block of each sequence, where a conversation or a
preempted sequence continues. The next state replaces the last of these; the others are then evicted before states
without a later state of the same text. The end of a prompt is not replaced by its answer: chat templates omit the
reasoning of earlier answers, so the next prompt diverges from the answer at its start.

Messages end with the end-of-sequence tokens that chat templates put after each message.

If states are saved, running sequences get at most half of the slots (at least one): otherwise they would use all of
them under load, and no saved state would remain. Each running sequence then has a slot to write to, even if it
continues from a saved or shared state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf

from runtime.core.draft_states import StateCosts, num_draft_states
from runtime.core.memory_plan import most_running
from runtime.core.request import Sequence
from runtime.core.step import NO_STATE, BlockRestore, ScheduledSequence
from runtime.engine.state_pool import StatePool

NO_COSTS = StateCosts()


class StateManager:
    """Manages the state slots of sequences for the scheduler. Single-threaded.

    Args:
        block_size: tokens per block.
        interval: tokens between two saved states of a prompt, rounded up to whole blocks.
        saves: whether states are saved for later sequences.
        end_token_ids: tokens that end a message of a prompt.
        costs: costs of states of draft tokens.

    Attributes:
        max_running: maximum number of running sequences.
        num_hits: number of sequences that started from a saved state.
    """

    def __init__(
        self,
        pool: StatePool,
        block_size: int,
        interval: int,
        *,
        saves: bool,
        end_token_ids: frozenset[int] = frozenset(),
        costs: StateCosts = NO_COSTS,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.interval = -(-interval // block_size) * block_size
        self.saves = saves
        self.end_token_ids = end_token_ids
        self.costs = costs
        self.max_running = most_running(pool.num_slots) if saves else pool.num_slots
        self.num_hits = 0
        self._planned: list[ScheduledSequence] = []

    def starts(self, hashes: ListOf[bytes], num_tokens: int, num_running: int) -> Iterator[int]:
        """Yields possible prefix lengths in blocks from which a sequence may start, longest first.

        Yields nothing if there is no slot for one more sequence.

        Args:
            hashes: hashes of the full blocks of its `num_tokens` tokens, the last of which is always computed.
        """
        if num_running >= self.max_running:
            return
        for count in range(min(len(hashes), (num_tokens - 1) // self.block_size), 0, -1):
            if self.pool.find(hashes[count - 1]) is not None or hashes[count - 1] in self.pool.tier:
                yield count
        yield 0

    def start(self, sequence: Sequence, num_matched_tokens: int) -> list[BlockRestore]:
        """Starts a sequence after its `num_computed_tokens`, one of `starts`. Returns the transfers from host memory.

        Args:
            num_matched_tokens: number of tokens with cached keys and values.
        """
        count, restores = sequence.num_computed_tokens // self.block_size, []
        if count:
            self.num_hits += 1
            restores = self._take(sequence, sequence.block_hashes[count - 1])
        end = (sequence.num_tokens - 1) // self.block_size * self.block_size
        sequence.state_marks = (
            min(num_matched_tokens, end),
            end,
            sequence.num_computed_tokens,
            *self._message_ends(sequence),
        )
        sequence.saved_tokens = sequence.num_computed_tokens
        return restores

    def release(self, sequence: Sequence) -> None:
        """Releases the slot of a sequence."""
        if sequence.state_slot != NO_STATE:
            self.pool.release(sequence.state_slot)
        sequence.state_slot = NO_STATE
        sequence.saved_tokens = 0

    def plan(self, entries: Iterable[ScheduledSequence]) -> None:
        """Assigns the last token of each entry, without drafts, a slot to write to."""
        self._release_new_slots(self._planned)  # of a plan whose sequences have all ended meanwhile
        self._planned = list(entries)
        for entry in self._planned:
            entry.state_read = slot = entry.sequence.state_slot
            if slot == NO_STATE or (self.pool.num_free and not self.pool.is_writable(slot)):
                slot = self.pool.allocate()
            elif not self.pool.is_writable(slot):
                self.pool.evict(slot)  # there is only one slot
            entry.state_writes = ((entry.num_tokens - 1, slot),)

    def add_drafts(self, entry: ScheduledSequence, num_spare: int) -> None:
        """Assigns a slot to each draft token of an entry, or only to the last one, for which a slot must be free.

        Args:
            num_spare: slots to keep free for the drafts of other sequences, if there are enough.
        """
        num_free = max(1, self.pool.num_free - num_spare)
        count = num_draft_states(entry.num_draft_tokens, num_free, self.costs) if entry.num_draft_tokens else 0
        drafts = range(entry.num_tokens - count, entry.num_tokens)
        entry.state_writes += tuple((offset, self.pool.allocate()) for offset in drafts)

    def reached(self, entry: ScheduledSequence, num_tokens: int) -> int:
        """Returns the number of tokens, of `num_tokens` computed and accepted ones, up to the last stored state."""
        return max(place for offset, _ in entry.state_writes if (place := entry.start + offset + 1) <= num_tokens)

    def add_saves(self) -> None:
        """Plans the states to save inside spans, as far as slots are available: the last ones of each prompt."""
        for entry in self._planned if self.saves else ():
            stop = entry.start + entry.num_tokens - entry.num_draft_tokens
            for place in self._places(entry.sequence, entry.start, stop):
                if not self.pool.num_free:
                    return
                entry.state_writes = ((place - entry.start - 1, self.pool.allocate()), *entry.state_writes)

    def complete(self, entry: ScheduledSequence) -> None:
        """Records the state after the computed tokens of a sequence, and saves those at block boundaries."""
        sequence, written = entry.sequence, {slot for _, slot in entry.state_writes}
        kept = entry.state_read if entry.state_read not in written else NO_STATE
        for offset, slot in entry.state_writes:
            place = entry.start + offset + 1
            released = kept if place <= sequence.num_computed_tokens else slot
            if released != NO_STATE:
                self.pool.release(released)
            if released != slot:
                kept = sequence.state_slot = slot
                self._save(sequence, slot, place)

    def settle(self, completed: ListOf[ScheduledSequence], *, done: bool) -> None:
        """Records the completion, or the failure, of the plan in flight. Discards the states written by its other
        entries, whose sequences have ended or were preempted."""
        kept = {entry.sequence for entry in completed}
        self._release_new_slots(entry for entry in self._planned if entry.sequence not in kept)
        self._planned = []
        self.pool.tier.settle(done=done)

    def _release_new_slots(self, entries: Iterable[ScheduledSequence]) -> None:
        for slot in _new_slots(entries):
            self.pool.release(slot)

    def forget(self, sequence: Sequence) -> None:
        """Removes all saved states of a sequence's prefixes."""
        self.pool.forget(sequence.block_hashes)
        self.pool.tier.forget(sequence.block_hashes)

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        """Resets the pool to the slots of these sequences, without saved states."""
        self._planned = []
        self.pool.rebuild(_held(sequences))

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verifies the pool against the running sequences and the plan in flight. Raises RuntimeError."""
        sequences = list(sequences)
        self.pool.check([*_held(sequences), *_new_slots(self._planned)])
        if len(sequences) > self.max_running:
            raise RuntimeError(f"{len(sequences)} sequences run, and slots are for {self.max_running}")

    def _message_ends(self, sequence: Sequence) -> list[int]:
        """Returns the last message ends in the rest of a prompt, rounded down to whole blocks; at most half of the
        slots reserved for saved states are used for one prompt."""
        if not self.saves:
            return []
        start, size = sequence.num_computed_tokens, self.block_size
        rest = enumerate(sequence.request.prompt_token_ids[start:], start + 1)
        places = sorted({end // size * size for end, token_id in rest if token_id in self.end_token_ids})
        return places[-max(1, (self.pool.num_slots - self.max_running) // 2) :]

    def _take(self, sequence: Sequence, block_hash: bytes) -> list[BlockRestore]:
        """Assigns the saved state with this hash to a sequence; a state from host memory gets a new slot."""
        slot = self.pool.find(block_hash)
        if slot is not None:
            self.pool.hold(slot)
            sequence.state_slot = slot
            return []
        # Before the allocation, because its eviction may replace entries in host memory.
        (saved,) = self.pool.tier.load([block_hash])
        sequence.state_slot = self.pool.allocate()
        return [BlockRestore(saved, sequence.state_slot)]

    def _places(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """Returns positions inside a span whose states are saved, last one first."""
        first = (start // self.interval + 1) * self.interval
        places = {*range(first, stop, self.interval), *sequence.state_marks}
        return sorted((place for place in places if start < place < stop), reverse=True)

    def _save(self, sequence: Sequence, slot: int, place: int) -> None:
        """Saves a state at a block boundary."""
        index, rest = divmod(place, self.block_size)
        if rest or not self.saves or index > len(sequence.block_hashes):
            return
        last, (_, prompt_end, *_) = sequence.saved_tokens, sequence.state_marks
        if last and last != prompt_end:
            lasts = last in sequence.state_marks or last % self.interval == 0
            self.pool.replace(sequence.block_hashes[last // self.block_size - 1], lasts=lasts)
        self.pool.save(slot, sequence.block_hashes[index - 1], wanted=place == sequence.state_marks[0])
        sequence.saved_tokens = place


def _new_slots(entries: Iterable[ScheduledSequence]) -> list[int]:
    """Returns the slots that entries write and do not read, which no sequence holds before they are complete."""
    return [slot for entry in entries for slot in {slot for _, slot in entry.state_writes} - {entry.state_read}]


def _held(sequences: Iterable[Sequence]) -> list[int]:
    return [sequence.state_slot for sequence in sequences if sequence.state_slot != NO_STATE]

"""The draft model's shadows: right tokens at right places whatever was accepted, and no block lost."""

import pytest
from fake_runner import FakeRunner, expected_tokens
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.speculative.draft_model import ModelDrafter

BLOCK = 4


def new_sequence(name: str, prompt: list[int], seed: int = 0) -> Sequence:
    return Sequence(Request(name, tuple(prompt), SamplingParams(logprobs=2), seed), list(prompt))


def make_drafter(num_blocks: int = 100, num_state_slots: int = 0, **options: int) -> tuple[ModelDrafter, FakeRunner]:
    runner = FakeRunner(num_blocks, BLOCK, num_state_slots=num_state_slots)
    return ModelDrafter(runner, RuntimeConfig(block_size=BLOCK, **options)), runner


@examples(150)
@given(st.data())
def test_guesses_are_what_the_draft_model_says_next(data: st.DataObject) -> None:
    """Whatever was accepted, skipped or added in the meantime, of sequences that come and go; with recurrent states,
    of which the runner checks each, or without."""
    num_state_slots = data.draw(st.sampled_from([0, 2, 7]))
    drafter, _ = make_drafter(
        data.draw(st.integers(4, 60)), num_state_slots, prefill_chunk=7, max_num_batched_tokens=16
    )
    live: list[Sequence] = []
    for step in range(data.draw(st.integers(1, 15))):
        if not live or data.draw(st.booleans()):
            live.append(new_sequence(str(step), [step % 5] * data.draw(st.integers(1, 12)), seed=step))
        wishes = [(sequence, data.draw(st.integers(0, 4))) for sequence in live]
        drafter.propose(wishes)
        for sequence, count in wishes:
            guesses = sequence.draft_token_ids
            assert len(guesses) <= count
            assert guesses == expected_tokens(sequence.token_ids, len(guesses), sequence.request.seed)
            accepted = data.draw(st.integers(0, len(guesses)))
            if data.draw(st.integers(0, 4)):
                sequence.token_ids += [*guesses[:accepted], data.draw(st.integers(0, 49))]
        live = [sequence for sequence in live if data.draw(st.integers(0, 3))]
    drafter.propose([])
    assert sorted(drafter._free) == list(range(drafter.runner.num_blocks))
    assert len(drafter._free_slots) == num_state_slots // 2


def test_many_are_drafted_together_and_nothing_is_computed_twice() -> None:
    drafter, runner = make_drafter()
    sequences = [new_sequence(str(n), [n] * 9, seed=n) for n in range(3)]
    drafter.propose([(sequence, 3) for sequence in sequences])
    assert runner.plans == [{"0": 9, "1": 9, "2": 9}, {"0": 1, "1": 1, "2": 1}, {"0": 1, "1": 1, "2": 1}]
    runner.plans.clear()
    sequences[0].token_ids += [*sequences[0].draft_token_ids, 7]  # all accepted, and one more
    sequences[1].token_ids += [sequences[1].draft_token_ids[0], 7]  # one accepted
    drafter.propose([(sequence, 1) for sequence in sequences[:2]])
    assert runner.plans == [{"0": 2, "1": 1}]


def test_a_long_way_behind_is_caught_up_in_chunks_without_guesses() -> None:
    drafter, runner = make_drafter(prefill_chunk=8)
    sequence = new_sequence("a", [3] * 20)
    for _ in range(2):
        drafter.propose([(sequence, 2)])
        assert sequence.draft_token_ids == []
    drafter.propose([(sequence, 2)])
    assert len(sequence.draft_token_ids) == 2
    assert [sum(plan.values()) for plan in runner.plans] == [8, 8, 4, 1]


def test_without_blocks_or_context_there_are_no_guesses() -> None:
    drafter, _ = make_drafter(num_blocks=3)
    long, short = new_sequence("a", [3] * 12), new_sequence("b", [3] * 5)
    drafter.propose([(long, 2), (short, 2)])
    assert (long.draft_token_ids, len(short.draft_token_ids)) == ([], 2)
    drafter.runner.max_model_len = 5
    drafter.propose([(short, 2)])
    assert short.draft_token_ids == []


def test_a_draft_that_is_not_finite_is_no_guess() -> None:
    drafter, runner = make_drafter()
    runner.broken_ids.add("a")
    broken, fine = new_sequence("a", [1, 2]), new_sequence("b", [1, 2])
    drafter.propose([(broken, 2), (fine, 2)])
    assert (broken.draft_token_ids, len(fine.draft_token_ids)) == ([], 2)


class OnlyEven:
    """A constraint that allows even tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.is_complete = False

    def mask(self) -> bytes:
        return b"\x55" * 7

    def accept(self, token_ids: list[int]) -> int:
        count = next((index for index, token in enumerate(token_ids) if token % 2), len(token_ids))
        self.taken += token_ids[:count]
        return count

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]


@pytest.mark.parametrize("fails", [False, True])
def test_a_constraint_ends_guesses_and_comes_back_as_it_was(fails: bool) -> None:
    drafter, runner = make_drafter()
    sequences = [new_sequence(str(n), [n] * 3, seed=n) for n in range(20)]
    for sequence in sequences:
        sequence.constraint = OnlyEven()
    runner.failure = RuntimeError("injected") if fails else None
    if fails:
        with pytest.raises(RuntimeError, match="injected"):
            drafter.propose([(sequence, 4) for sequence in sequences])
    else:
        drafter.propose([(sequence, 4) for sequence in sequences])
        assert all(token % 2 == 0 for sequence in sequences for token in sequence.draft_token_ids)
        assert len({len(sequence.draft_token_ids) for sequence in sequences}) > 2
    assert not any(sequence.constraint.taken for sequence in sequences)

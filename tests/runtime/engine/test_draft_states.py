"""States of draft tokens: written for each, or computed again from the last one, whichever is cheaper and possible."""

import pytest
from engines import collect, tokens_of
from fake_runner import FakeDrafter, FakeRunner, expected_tokens

from runtime.core.config import RuntimeConfig
from runtime.core.draft_states import StateCosts, num_draft_states, tokens_computed_again
from runtime.core.request import Delta, SamplingParams
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.speculative.proposer import Gate, Speculator

DEAR_STATES, CHEAP_STATES = StateCosts(write_bytes=100, token_bytes=1), StateCosts(write_bytes=1, token_bytes=100)


@pytest.mark.parametrize(
    ("num_drafts", "num_free", "costs", "expected"),
    [
        (4, 9, CHEAP_STATES, 4),
        (4, 9, DEAR_STATES, 1),
        (4, 4, CHEAP_STATES, 4),
        (4, 3, CHEAP_STATES, 1),
        (4, 0, CHEAP_STATES, 0),
        (1, 9, DEAR_STATES, 1),
        # Three states of 4 bytes against 1.2 tokens of 10 or of 9.
        (4, 9, StateCosts(4, 10), 4),
        (4, 9, StateCosts(4, 9), 1),
    ],
)
def test_the_cheaper_way_that_is_possible_is_chosen(
    num_drafts: int, num_free: int, costs: StateCosts, expected: int
) -> None:
    assert num_draft_states(num_drafts, num_free, costs) == expected


@pytest.mark.parametrize("num_drafts", range(1, 6))
def test_tokens_computed_again_are_a_mean_over_numbers_of_accepted_ones(num_drafts: int) -> None:
    again = [accepted if accepted < num_drafts else 0 for accepted in range(num_drafts + 1)]
    assert tokens_computed_again(num_drafts) == pytest.approx(sum(again) / len(again))


def make_engine(costs: StateCosts, num_slots: int, gate: Gate | None = None) -> Engine:
    runner = FakeRunner(400, 4, 1000, num_state_slots=num_slots, state_costs=costs)
    speculator = Speculator(FakeDrafter(4, 0.7), 4, gate)
    return Engine(runner, None, RuntimeConfig(block_size=4, prefix_caching=False), speculator=speculator)


def run(engine: Engine, count: int = 3, max_tokens: int = 40) -> list[tuple[int, int]]:
    """Numbers of drafts, if there are several, and of states that each entry wrote for them.

    Tokens are those without drafts, every step computes one more of each sequence, and no drafts are left over."""
    prompts = [[number, 2, 3] for number in range(count)]
    names = [engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=2)) for prompt in prompts]
    deltas: dict[str, list[Delta]] = {}
    written, execute = [], engine.runner.execute

    def executed(plan: StepPlan) -> StepOutput:
        drafted = [(entry.num_draft_tokens, len(entry.state_writes) - 1) for entry in plan.entries]
        written.extend(pair for pair in drafted if pair[0] > 1)
        return execute(plan)

    engine.runner.execute = executed
    while engine.has_work:
        before = {sequence: sequence.num_computed_tokens for sequence in engine.scheduler.running}
        collect(engine, deltas)
        for sequence in engine.scheduler.running:
            assert sequence.num_computed_tokens > before.get(sequence, 0)
            assert not sequence.draft_token_ids
    for name, prompt in zip(names, prompts, strict=True):
        assert tokens_of(deltas[name]) == expected_tokens(prompt, max_tokens, 2)
    return written


def test_each_draft_has_a_state_where_states_are_cheap() -> None:
    engine = make_engine(CHEAP_STATES, 30)
    assert all(num_states == num_drafts for num_drafts, num_states in run(engine))
    assert engine.metrics.spec_decode_num_accepted_tokens_total > 40


def test_accepted_drafts_are_computed_again_where_states_are_dear() -> None:
    """Fewer steps than tokens are needed all the same."""
    engine = make_engine(DEAR_STATES, 30)
    assert {num_states for _, num_states in run(engine)} == {1}
    assert engine.metrics.steps_total < 40 - 8


def test_sequences_share_few_slots() -> None:
    """Each drafts as much as it likes, and writes one state at least."""
    written = run(make_engine(CHEAP_STATES, 6))
    assert {num_states for _, num_states in written} >= {1, 2}
    assert max(num_drafts for num_drafts, num_states in written if num_states == 1) > 2


def test_steps_that_compute_drafts_again_count_for_drafting() -> None:
    """Otherwise the gate would compare plain steps with the cheaper half of the others."""
    noted = []

    class Watched(Gate):
        def allows(self, batch_size: int) -> bool:
            return True

        def note(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
            noted.append((num_tokens, drafted))

    engine = make_engine(DEAR_STATES, 30, Watched())
    run(engine, count=1)
    assert sum(num_tokens for num_tokens, _ in noted) == 40 - 1, "all but the token of the prompt"
    again = [plan for plan in engine.runner.plans[1:] if sum(plan.values()) > 1]
    assert sum(drafted for _, drafted in noted) == len(again)

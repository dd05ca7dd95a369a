import random

import pytest

from runtime.speculative.proposer import PERIOD, PROBE_EVERY, TRIAL, Gate, Speculator, Window


def run_window(window: Window, probability: float, steps: int, seed: int = 0) -> list[int]:
    """Widths that were requested while each draft token is accepted with this probability."""
    chance, widths = random.Random(seed), []
    for _ in range(steps):
        width = window.next()
        widths.append(width)
        if width:
            right = 0
            while right < width and chance.random() < probability:
                right += 1
            window.note(width, right)
    return widths


@pytest.mark.parametrize(("probability", "low", "high"), [(1.0, 8, 8), (0.8, 2.5, 7), (0.5, 0.8, 2.5), (0.0, 0, 0.2)])
def test_windows_follow_what_is_accepted(probability: float, low: float, high: float) -> None:
    widths = run_window(Window(8, expected=4.0), probability, 400)[100:]
    assert low <= sum(widths) / len(widths) <= high
    assert max(widths) <= 8


def test_the_hopeless_are_asked_again_now_and_then_and_may_recover() -> None:
    window = Window(6, expected=3.0)
    widths = run_window(window, 0.0, 200)[-PROBE_EVERY * 4 :]
    assert sum(widths) == 4
    assert set(widths) == {0, 1}
    assert run_window(window, 1.0, 100)[-1] == 6


def run_gate(gate: Gate, batch: int, steps: int, drafting: float, plain: float) -> int:
    """Steps with guesses, when these are the tokens per second with and without them."""
    count = 0
    for _ in range(steps):
        allowed = gate.allows(batch)
        count += allowed
        gate.note(10, 10 / (drafting if allowed else plain), drafted=allowed)
    return count


def test_guessing_stops_where_it_does_not_pay() -> None:
    gate = Gate()
    steps = 4 * PERIOD
    assert run_gate(gate, 4, steps, drafting=200, plain=100) == steps - 4 * TRIAL
    assert run_gate(gate, 40, steps, drafting=90, plain=100) == 4 * TRIAL
    assert run_gate(gate, 5, steps, drafting=200, plain=100) == steps - 4 * TRIAL, "sizes know nothing of each other"


def test_a_change_is_noticed_in_the_next_period() -> None:
    gate = Gate()
    run_gate(gate, 1, PERIOD, drafting=200, plain=100)
    run_gate(gate, 1, PERIOD, drafting=50, plain=100)
    assert run_gate(gate, 1, PERIOD, drafting=50, plain=100) == TRIAL


def test_the_step_of_a_change_is_not_measured() -> None:
    """A draft model that has to catch up is slow once."""
    gate, before, count = Gate(), None, 0
    for _ in range(PERIOD):
        allowed = gate.allows(1)
        seconds = 1000.0 if allowed != before else 10 / (200 if allowed else 100)
        gate.note(10, seconds, drafted=allowed)
        before, count = allowed, count + allowed
    assert count == PERIOD - TRIAL


def test_without_a_clock_guessing_stays_on() -> None:
    gate = Gate()
    allowed = []
    for _ in range(PERIOD):
        allowed.append(gate.allows(1))
        gate.note(10, 0.0, drafted=allowed[-1])
    assert sum(allowed) == PERIOD - TRIAL


def test_a_drafter_that_has_no_guess_yet_is_not_judged() -> None:
    """As n-grams before the text begins to repeat itself."""
    gate = Gate()
    for seconds in range(1, 3 * PERIOD):
        assert gate.allows(1)
        gate.note(1, 1.0 + 1 / seconds, drafted=False)
    assert run_gate(gate, 1, PERIOD, drafting=3, plain=1) == PERIOD - TRIAL


def test_one_slow_step_does_not_decide() -> None:
    """Another process took the processor for a moment."""
    gate, count = Gate(), 0
    for step in range(PERIOD):
        allowed = gate.allows(1)
        count += allowed
        gate.note(10, 50.0 if step == 2 else 10 / (200 if allowed else 100), drafted=allowed)
    assert count == PERIOD - TRIAL


def test_what_was_proposed_for_a_step_is_dropped_before_the_next() -> None:
    """Even if none is drafted for then: a preempted sequence keeps no distributions."""
    proposals = {("a", 3): 0.5}
    Speculator(drafter=None, num_draft_tokens=4, before=proposals.clear).propose([])
    assert not proposals

"""When a draft model pays, by counting tokens of simulated steps."""

import random

import pytest

from compress.draft_model import break_even


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_steps_with_drafts_are_as_fast_as_without_where_they_break_even(cost: float, num_drafts: int) -> None:
    acceptance = break_even(int(cost * 1000), 1000, num_drafts)
    assert acceptance is not None
    draw, steps, tokens = random.Random(0), 20_000, 0
    for _ in range(steps):
        accepted = next((n for n in range(num_drafts) if draw.random() >= acceptance), num_drafts)
        tokens += accepted + 1
    seconds = steps * (1 + num_drafts * cost)
    assert tokens / seconds == pytest.approx(1, abs=0.015)


def test_a_draft_model_that_costs_more_than_the_model_never_pays() -> None:
    assert break_even(1001, 1000, 4) is None
    assert break_even(1000, 1000, 4) == 1.0
    assert break_even(0, 1000, 4) == pytest.approx(0, abs=1e-9)

"""The allocation against every possible choice, and how a divergence is met in few tries."""

import itertools
import random

import pytest

from compress.search.allocate import CLOSE, Frontier, Option, Try, best, next_kl_target


def random_menus(seed: int, groups: int = 5, options: int = 4) -> list[list[Option]]:
    chance = random.Random(seed)
    grain = chance.choice([1, 7, 64])
    return [
        [Option(grain * chance.randint(1, 40), chance.random()) for _ in range(chance.randint(1, options))]
        for _ in range(chance.randint(1, groups))
    ]


def every_choice(candidates: list[list[Option]]) -> list[tuple[int, float]]:
    """Cost and loss of all choices."""
    choices = itertools.product(*candidates)
    return [(sum(each.cost for each in choice), sum(each.loss for each in choice)) for choice in choices]


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_is_better_within_a_budget(seed: int) -> None:
    candidates = random_menus(seed)
    frontier, possible = Frontier(candidates), every_choice(candidates)
    for budget in {cost + change for cost, _ in possible[:40] for change in (-1, 0, 1)}:
        affordable = [loss for cost, loss in possible if cost <= budget]
        found = frontier.within_cost(budget)
        if not affordable:
            assert found is None
            continue
        assert found.cost <= budget
        assert found.loss == pytest.approx(min(affordable), abs=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_is_smaller_within_a_loss(seed: int) -> None:
    candidates = random_menus(seed)
    frontier, possible = Frontier(candidates), every_choice(candidates)
    for limit in {loss + 1e-9 for _, loss in possible[:40] if loss >= frontier.least_loss}:
        found = frontier.within_loss(limit)
        assert found.loss <= limit
        assert found.cost == min(cost for cost, loss in possible if loss <= limit)


@pytest.mark.parametrize("seed", range(20))
def test_few_steps_stay_within_the_budget_and_near_the_best(seed: int) -> None:
    candidates = random_menus(seed, groups=6)
    possible = every_choice(candidates)
    budget = sorted(cost for cost, _ in possible)[len(possible) // 2]
    best = min(loss for cost, loss in possible if cost <= budget)
    found = Frontier(candidates, steps=64).within_cost(budget)
    worst = max(loss for _, loss in possible)
    assert found.cost <= budget
    assert best - 1e-12 <= found.loss <= best + 0.15 * (worst - best) + 1e-12


def test_a_larger_budget_never_loses_more() -> None:
    frontier = Frontier(random_menus(3, groups=12, options=6))
    losses = [frontier.within_cost(budget).loss for budget in range(frontier.smallest, frontier.smallest + 400, 7)]
    assert losses == sorted(losses, reverse=True)


def test_a_menu_of_one_is_taken_as_it_is() -> None:
    found = Frontier([[Option(5, 0.1)], [Option(3, 0.2)]]).within_cost(8)
    assert (found.chosen, found.cost) == ((0, 0), 8)


def test_a_scheme_that_costs_more_and_loses_more_is_never_chosen() -> None:
    frontier = Frontier([[Option(10, 0.1), Option(20, 0.3)], [Option(10, 0.1), Option(20, 0.05)]])
    assert frontier.within_cost(1000).chosen == (0, 1)


def tries_until_close(limit: float, measured, most: int = 6) -> list[Try]:
    """Plays a search: `measured` is the divergence of a checkpoint by its prediction; sizes fall with it."""
    tries: list[Try] = []
    allowed = next_kl_target(tries, limit)
    while allowed is not None and len(tries) < most:
        tries.append(Try(allowed, measured(allowed), int(1e6 / allowed)))
        allowed = next_kl_target(tries, limit)
    return tries


@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.0, 1.4, 5.0])
@pytest.mark.parametrize("power", [0.9, 1.0, 1.15])
def test_predictions_that_are_off_by_a_factor_take_few_tries(ratio: float, power: float) -> None:
    tries = tries_until_close(0.05, lambda predicted: ratio * predicted**power)
    found = best(tries, 0.05)
    assert len(tries) <= 4
    assert CLOSE * 0.05 <= found.measured <= 0.05


def test_uneven_divergence_still_ends_within_the_limit() -> None:
    def measured(predicted: float) -> float:
        return 0.6 * predicted if predicted < 0.06 else 1.5 * predicted

    found = best(tries_until_close(0.05, measured), 0.05)
    assert 0.03 < found.measured <= 0.05


def test_the_smallest_of_those_that_keep_the_limit_is_the_best() -> None:
    tries = [Try(0.05, 0.04, 900), Try(0.06, 0.049, 800), Try(0.07, 0.051, 700)]
    assert best(tries, 0.05) is tries[1]
    assert best(tries, 0.03) is None

"""Coming close to a divergence that only finished checkpoints show, in few tries."""

import pytest

from compress.search.allocate import CLOSE, Try, best, next_kl_target


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

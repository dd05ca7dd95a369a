"""From how many tokens panels are taken, by measured times."""

import pytest

from runtime.backends.triton.product_times import DENSE, EXPANDED, NEVER, measured_panel_from, panel_from, time_of

DENSE_TIMES = {1: 50.0, 64: 50.0, 1024: 400.0}
TIMES = {DENSE: DENSE_TIMES, EXPANDED: {1: 20.0, 1024: 450.0}}
"""Dequantizing takes 50 microseconds."""


@pytest.mark.parametrize(
    ("times", "tokens"),
    [
        ({1: 30.0, 64: 60.0, 1024: 960.0}, 256),
        ({1: 99.0, 64: 101.0, 1024: 960.0}, 64),
        ({1: 2000.0, 1024: 60000.0}, 1),
        ({1: 30.0, 1024: 400.0}, NEVER),
    ],
)
def test_panels_are_taken_once_they_are_faster(times: dict[int, float], tokens: int) -> None:
    assert panel_from(TIMES | {"form": times}, "form") == tokens


def test_times_lie_on_lines_between_the_measured_ones_and_beyond() -> None:
    found = [time_of(DENSE_TIMES, tokens) for tokens in (1, 16, 64, 544, 1024, 1984)]
    assert found == [50, 50, 50, 225, 400, 750]


def test_forms_that_lost_on_the_measured_card_have_panels() -> None:
    losing = ("fp8", "fp8 blocks", "nvfp4", "nf4")
    assert {form: measured_panel_from(form) for form in losing} == dict.fromkeys(losing, 256) | {"nvfp4": 128}
    assert measured_panel_from("exl3") == 1
    assert measured_panel_from("int2 g64") == NEVER

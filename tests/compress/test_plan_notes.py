"""Which factorized layers a plan says to be slow on a GPU."""

import pytest

from compress.checkpoint.scheme import FLOAT_BITS
from compress.checkpoint.weights import Int, LowRank, Scheme
from compress.methods import base
from compress.plan import LayerPlan, PlanRow
from compress.plan_notes import LAUNCH_SECONDS, READ_RATE, factor_notes, slower_seconds


def row(outputs: int, inputs: int, scheme: Scheme | None) -> PlanRow:
    before = 2 * outputs * inputs
    after = before if scheme is None else scheme.stored_bits(outputs, inputs) // 8
    assignment = LayerPlan(base.quantization("rtn"), scheme) if scheme else None
    return PlanRow(f"layer.{outputs}x{inputs}.weight", (outputs, inputs), assignment, "", before, after)


def test_a_second_product_pays_when_it_saves_more_than_its_launch() -> None:
    break_even = round(READ_RATE * LAUNCH_SECONDS)
    assert slower_seconds(10 * break_even, 9 * break_even) == pytest.approx(0, abs=1e-9)
    assert slower_seconds(10 * break_even, 8 * break_even) == pytest.approx(-LAUNCH_SECONDS, rel=1e-3)
    assert slower_seconds(0, 0) == LAUNCH_SECONDS


@pytest.mark.parametrize(
    ("shape", "bits", "rank", "is_slower"),
    [
        ((4096, 4096), FLOAT_BITS, 1664, True),  # 27 of 34 MB: six microseconds against seven, and a launch
        ((14336, 4096), FLOAT_BITS, 1600, False),  # half of 117 MB
        ((4096, 4096), 4, 1024, True),  # never for a layer that is read in two microseconds
        ((14336, 4096), 4, 2560, True),  # saves six of 30 MB
        ((28672, 8192), 4, 2048, False),
    ],
)
def test_small_layers_and_small_savings_are_named(shape, bits: int, rank: int, is_slower: bool) -> None:
    scheme = LowRank(None if bits == FLOAT_BITS else Int(bits), rank)
    notes = factor_notes([row(*shape, scheme), row(64, 64, Int(4, 32)), row(64, 64, None)])
    assert bool(notes) is is_slower
    if notes:
        assert notes[0].startswith("1 of 1 factorized layers")
        assert f"layer.{shape[0]}x{shape[1]}" in notes[0]


def test_without_factors_nothing_is_said() -> None:
    assert factor_notes([row(64, 64, Int(4, 32)), row(64, 64, None)]) == []

"""Shares of ranks: never more weights than asked for, and what the budget buys is worth the most."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from compress.checkpoint.weights import Int
from compress.methods.low_rank import RankedLinear, largest_rank, rank_step, share_out, uniform_rank


@pytest.mark.parametrize(
    ("scheme", "step"),
    [
        (None, 8),
        (Int(8, None), 8),
        (Int(4, None), 8),
        (Int(3, None), 32),
        (Int(2, None), 16),
        (Int(4, 64), 64),
    ],
)
def test_ranks_fill_words_and_groups(scheme, step) -> None:
    assert rank_step(scheme) == step


@given(
    rows=st.integers(1, 400),
    columns=st.integers(1, 400),
    keep=st.floats(0.01, 0.99),
    step=st.sampled_from([8, 32]),
)
def test_uniform_ranks_never_make_a_layer_larger(rows, columns, keep, step) -> None:
    rank = uniform_rank(rows, columns, keep, step)
    assert rank % step == 0
    assert rank * (rows + columns) < rows * columns
    assert rank * (rows + columns) <= keep * rows * columns or rank == step
    assert (
        largest_rank(rows, columns, 1) * (rows + columns)
        < rows * columns
        <= (rows + columns) * (largest_rank(rows, columns, 1) + 1)
    )


def weights(linear: RankedLinear, rank: int | None) -> int:
    return linear.weights if rank is None else rank * (linear.rows + linear.columns)


def lost(linear: RankedLinear, rank: int | None) -> float:
    return 0.0 if rank is None else sum(linear.energies[rank:])


def random_linear(draw) -> RankedLinear:
    rows, columns = draw(st.sampled_from([32, 64])), draw(st.sampled_from([32, 64]))
    values = draw(st.lists(st.floats(0, 100), min_size=min(rows, columns), max_size=min(rows, columns)))
    return RankedLinear(rows, columns, 8, sorted(values, reverse=True))


@examples(60)
@given(data=st.data(), keep=st.floats(0.5, 0.95))
def test_shared_ranks_stay_within_the_budget(data, keep) -> None:
    linears = {name: random_linear(data.draw) for name in "abc"}
    ranks = share_out(linears, keep)
    budget = keep * sum(linear.weights for linear in linears.values())
    assert ranks.keys() == linears.keys()
    assert sum(weights(linears[name], rank) for name, rank in ranks.items()) <= budget
    for name, rank in ranks.items():
        assert rank is None or (rank % 8 == 0 and weights(linears[name], rank) < linears[name].weights)


def test_no_other_ranks_of_that_size_lose_less() -> None:
    steep = [1000 / 2**index for index in range(32)]
    flat = [20.0] * 32
    linears = {"steep": RankedLinear(32, 32, 8, steep), "flat": RankedLinear(32, 32, 8, flat)}
    ranks = share_out(linears, 0.75)
    size = sum(weights(linears[name], rank) for name, rank in ranks.items())
    found = sum(lost(linears[name], rank) for name, rank in ranks.items())
    others = [
        sum(lost(linears[name], rank) for name, rank in zip(linears, each, strict=True))
        for each in itertools.product((8, None), repeat=2)
        if sum(weights(linears[name], rank) for name, rank in zip(linears, each, strict=True)) <= size
    ]
    assert found == min(others)
    assert ranks == {"steep": 8, "flat": None}


def test_a_budget_that_cannot_pay_for_a_whole_weight_is_spent_on_ranks() -> None:
    flat = RankedLinear(64, 64, 8, [0.97**index for index in range(64)])
    assert share_out({"a": flat}, 0.75) == {"a": 24}


def test_a_budget_below_the_smallest_factors_still_gives_them() -> None:
    linear = RankedLinear(64, 64, 8, [1.0] * 64)
    assert share_out({"a": linear}, 0.01) == {"a": 8}

"""Decompositions lose what they drop, and no other factors lose less; shares of ranks stay within the budget."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from compress.checkpoint.weights import Int
from compress.common.errors import NumericsError
from compress.methods.low_rank import RankedLinear, largest_rank, rank_step, share_out, uniform_rank
from compress.methods.shared.decomposition import Whitening, decompose, scale_inputs, whiten

ROWS, COLUMNS, TOKENS = 24, 40, 400


def inputs(seed: int = 0, columns: int = COLUMNS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return (
        torch.randn(TOKENS, columns, generator=generator, dtype=torch.float64)
        @ mixing
        * torch.rand(columns, generator=generator, dtype=torch.float64).mul(5).exp()
    )


def weight(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def test_dropped_singular_values_are_the_error_of_the_output() -> None:
    x, w = inputs(), weight()
    moment = x.T @ x / TOKENS
    whitening = whiten(moment, damping=(1e-9,))
    assert whitening.recovery == ""
    found = decompose(w, whitening, 16)
    for rank in (4, 8, 16):
        left, right = found.truncated(rank)
        error = x @ (w.double() - left.double() @ right.double()).T
        assert float(error.square().sum() / TOKENS) == pytest.approx(float(found.energies[rank:].sum()), rel=1e-3)


def test_with_damping_it_is_the_error_in_the_damped_metric() -> None:
    x, w = inputs(), weight()
    moment = x.T @ x / TOKENS
    whitening = whiten(moment)
    assert whitening.damping == 0.01
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(COLUMNS)
    found = decompose(w, whitening, 8)
    left, right = found.truncated(8)
    error = w.double() - left.double() @ right.double()
    assert float((error @ damped * error).sum()) == pytest.approx(float(found.energies[8:].sum()), rel=1e-4)


def test_plain_factors_are_the_best_of_the_weight() -> None:
    w = weight()
    found = decompose(w, Whitening(), 12)
    left, right = found.truncated(6)
    assert float((w - left @ right).square().sum()) == pytest.approx(float(found.energies[6:].sum()), rel=1e-4)
    torch.testing.assert_close(found.energies.sqrt(), torch.linalg.svdvals(w.double()))
    # Both factors carry the same share: their columns and rows are of one length.
    torch.testing.assert_close(left.norm(dim=0), right.norm(dim=1))


def test_whitened_factors_lose_less_than_scaled_ones_and_those_less_than_plain_ones() -> None:
    x, w = inputs(), weight()
    errors = []
    for whitening in (whiten(x.T @ x / TOKENS, (1e-6,)), scale_inputs(x.abs().mean(0)), Whitening()):
        left, right = decompose(w, whitening, 12).truncated(12)
        errors.append(float((x @ (w - left @ right).double().T).square().sum()))
    assert errors == sorted(errors)


def test_inputs_that_are_always_zero_need_no_care() -> None:
    x = inputs()
    x[:, 3] = 0
    whitening = whiten(x.T @ x / TOKENS)
    left, right = decompose(weight(), whitening, 12).truncated(12)
    assert bool(torch.isfinite(left @ right).all())
    left, right = decompose(weight(), scale_inputs(x.abs().mean(0)), 12).truncated(12)
    assert bool(torch.isfinite(left @ right).all())


def test_recoveries_are_said() -> None:
    zero = torch.zeros(4, 4)
    assert whiten(zero).recovery == "svd: every calibration input was zero"
    assert scale_inputs(zero[0]).recovery == "svd: every calibration input was zero"
    indefinite = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.05]))
    found = whiten(indefinite)
    assert found.recovery == "damping raised to 0.1"
    indefinite[3, 3] = -2.0
    found = whiten(indefinite + torch.eye(4) * 0.0)
    assert found.damping == 1.0 or found.recovery.startswith("eigenvalues raised") or found.recovery.startswith("svd")
    assert found.recovery


def test_what_is_no_number_is_refused() -> None:
    broken = torch.full((3, 3), float("nan"))
    with pytest.raises(NumericsError, match="weight"):
        decompose(broken, Whitening(), 2)
    with pytest.raises(NumericsError, match=r"moments .*9"):
        whiten(broken)
    with pytest.raises(NumericsError, match=r"magnitude .*3"):
        scale_inputs(broken[0])


@pytest.mark.parametrize(
    ("scheme", "step"),
    [(None, 8), (Int(8, None), 8), (Int(4, None), 8), (Int(3, None), 32), (Int(2, None), 16), (Int(4, 64), 64)],
)
def test_ranks_fill_words_and_groups(scheme, step) -> None:
    assert rank_step(scheme) == step


@given(rows=st.integers(1, 400), columns=st.integers(1, 400), keep=st.floats(0.01, 0.99), step=st.sampled_from([8, 32]))
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

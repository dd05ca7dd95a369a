"""Decompositions: what is dropped is what is lost, in the metric of each method, and no other factors lose less."""

import pytest
import torch

from compress.common.errors import NumericsError
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
        assert float(error.square().sum() / TOKENS) == pytest.approx(found.lost(rank), rel=1e-3)


def test_with_damping_it_is_the_error_in_the_damped_metric() -> None:
    x, w = inputs(), weight()
    moment = x.T @ x / TOKENS
    whitening = whiten(moment)
    assert whitening.damping == 0.01
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(COLUMNS)
    found = decompose(w, whitening, 8)
    left, right = found.truncated(8)
    error = w.double() - left.double() @ right.double()
    assert float((error @ damped * error).sum()) == pytest.approx(found.lost(8), rel=1e-4)


def test_plain_factors_are_the_best_of_the_weight() -> None:
    w = weight()
    found = decompose(w, Whitening(), 12)
    left, right = found.truncated(6)
    assert float((w - left @ right).square().sum()) == pytest.approx(found.lost(6), rel=1e-4)
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
    with pytest.raises(NumericsError, match="second moments"):
        whiten(broken)
    with pytest.raises(NumericsError, match="input magnitude"):
        scale_inputs(broken[0])

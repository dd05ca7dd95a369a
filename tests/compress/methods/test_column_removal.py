"""Columns that cost nothing leave first, and the fit of the others lowers the error of the outputs."""

import pytest
import torch
from torch import Tensor

from compress.methods.shared.column_removal import (
    choose_by_norm,
    choose_fitted,
    columns_of,
    damped,
    fit,
    fitted_scores,
    relative_error,
)


def made(columns: int = 12) -> tuple[Tensor, Tensor]:
    """A weight, and inputs that are correlated."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator)
    return torch.randn(5, columns, generator=generator), torch.randn(200, columns, generator=generator) @ mixing


def hessian_of(inputs: Tensor) -> Tensor:
    return inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("width", [1, 3])
def test_units_of_zeros_leave_first(width: int) -> None:
    weight, inputs = made()
    weight[:, 3:6] = 0
    inputs[:, 6:9] = 0
    hessian, keep = damped(hessian_of(inputs)), 6 // width
    expected = [*range(3 // width), *range(9 // width, 12 // width)]
    assert choose_by_norm(weight, hessian_of(inputs), width, keep).tolist() == expected
    units, fitted = choose_fitted(weight, hessian, width, keep)
    assert units.tolist() == expected
    assert relative_error(weight, hessian, columns_of(units, width), fitted) < 0.01


def test_a_column_that_repeats_another_leaves_though_it_is_the_largest() -> None:
    weight, inputs = made()
    inputs[:, 0] = inputs[:, 1] = 10 * inputs[:, 1]
    units, fitted = choose_fitted(weight, damped(hessian_of(inputs)), 1, 11)
    assert set(range(12)) - set(units.tolist()) <= {0, 1}
    assert 0 not in choose_by_norm(weight, hessian_of(inputs), 1, 1).tolist() or len(units) == 11
    outputs = inputs @ weight.T
    assert float((inputs[:, units].double() @ fitted.T - outputs).norm() / outputs.norm()) < 0.02


@pytest.mark.parametrize("width", [1, 4])
def test_scores_are_the_errors_after_the_fit(width: int) -> None:
    weight, inputs = made()
    hessian = damped(hessian_of(inputs))
    scores = fitted_scores(weight, torch.linalg.inv(hessian), width)
    whole = float((weight.double() @ hessian * weight.double()).sum())
    for unit in range(12 // width):
        others = columns_of(torch.tensor([each for each in range(12 // width) if each != unit]), width)
        error = relative_error(weight, hessian, others, fit(weight, hessian, others))
        assert error * whole == pytest.approx(float(scores[unit]), rel=1e-9)
        assert error < relative_error(weight, hessian, others, weight[:, others])

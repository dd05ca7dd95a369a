"""Rotations are orthogonal, fast and exact products, and as flat as their construction promises."""

import pytest
import torch

from compress.methods.shared.hadamard import Rotation, paley_matrix

FLAT = (1, 2, 48, 56, 64, 80, 144, 368, 896)


@pytest.mark.parametrize("order", [*FLAT, 7, 14, 94, 190])
def test_rotations_are_orthogonal(order: int) -> None:
    rotation = Rotation.random(order, seed=3)
    matrix = rotation.turn(torch.eye(order, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-12)
    if order in FLAT:
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, order**-0.5), rtol=1e-9, atol=0)
        assert rotation.kind.startswith(f"Hadamard of order {order}")
    else:
        assert "random orthogonal" in rotation.kind


@pytest.mark.parametrize("order", [12, 20, 28, 36, 44, 60, 76, 108])
def test_paley_matrices_are_hadamard(order: int) -> None:
    matrix = paley_matrix(order)
    assert bool((matrix.abs() == 1).all())
    assert (matrix @ matrix.T).equal(order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [4 * 23, 35, 14])
def test_orders_that_paley_does_not_reach_are_refused(order: int) -> None:
    with pytest.raises(ValueError, match=f"order {order}"):
        paley_matrix(order)


def test_turning_is_a_product_rounded_once() -> None:
    rotation = Rotation.random(96, seed=0)
    matrix = rotation.turn(torch.eye(96, dtype=torch.float64))
    rows, scale = torch.randn(5, 7, 96).bfloat16(), torch.rand(96, dtype=torch.float64)
    before = rows.clone()
    assert rotation.turn(rows).equal((rows.double() @ matrix).bfloat16())
    assert rotation.turn(rows, scale).equal((rows.double() * scale @ matrix).bfloat16())
    assert rows.equal(before)


def test_heads_turn_each_by_itself() -> None:
    rotation = Rotation.random(16, seed=0)
    rows = torch.randn(3, 64, dtype=torch.float64)
    expected = torch.cat([rotation.turn(head) for head in rows.split(16, dim=1)], dim=1)
    assert rotation.turn_heads(rows).equal(expected)


def test_an_outlier_channel_is_spread_over_all() -> None:
    rows = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    rows[:, 17] *= 100
    turned = Rotation.random(256, seed=0).turn(rows)
    assert float(turned.abs().max()) < 0.2 * float(rows.abs().max())

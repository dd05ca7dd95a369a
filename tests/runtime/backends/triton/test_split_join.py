"""Splits of attention joined in the form that the next product takes, against float64 and a conversion of their own."""

import pytest
import torch
from poisoned_memory import poisoned_allocations
from rounding import assert_same_bits

from runtime.backends.triton.fused_linear import ROWS_LAYOUT, SUMS, ActivationLayout

TOKENS, FIRST, HEADS = 2, 1, 3


def random_parts(splits: int, head_dim: int, device: torch.device):
    """Parts and the logarithms of their weights. Some splits saw nothing, and one row nothing at all."""
    generator = torch.Generator().manual_seed(splits)
    parts = torch.randn(TOKENS, HEADS, splits, head_dim, generator=generator)
    weights = torch.randn(TOKENS, HEADS, splits, generator=generator) * 4
    weights[..., : splits - 1 : 7] = float("-inf")
    weights[1, 2] = float("-inf")
    parts[weights == float("-inf")] = float("nan")
    return parts.to(device), weights.to(device)


def joined(parts, weights, sinks, form):
    from runtime.backends.triton.kernels.norm_act import empty_input
    from runtime.backends.triton.kernels.split_join import join

    inputs = HEADS * parts.shape[3]
    with poisoned_allocations():
        out = empty_input(parts, FIRST + TOKENS, inputs, form, torch.float16)
    before = out.rows[:FIRST].clone()
    join(parts, weights, sinks, out, form, FIRST)
    assert torch.equal(out.rows[:FIRST].view(torch.int16), before.view(torch.int16))
    return out


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("splits", "head_dim"), [(5, 64), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((1, 32), (33, 32)))]
)
def test_against_float64(gpu, splits: int, head_dim: int, has_sinks: bool) -> None:
    parts, weights = random_parts(splits, head_dim, gpu)
    sinks = torch.linspace(-3, 5, HEADS).half().to(gpu) if has_sinks else None
    share = torch.exp2(weights.double())
    total = share.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None])
    exact = (parts.nan_to_num().double() * (share / total.clamp(min=1e-30))[..., None]).sum(2)
    found = joined(parts, weights, sinks, ROWS_LAYOUT).rows[FIRST:].view_as(exact).double()
    assert (found - exact).norm() < 1e-3 * exact.norm()
    assert (found[1, 2] == 0).all()


@pytest.mark.parametrize(
    ("head_dim", "unit"),
    [(32, 128), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((64, 32), (128, 128)))],
)
def test_sums_beside_rows(gpu, head_dim: int, unit: int) -> None:
    """Sums of fewer inputs than a head has, of several heads, and beyond the last head."""
    from runtime.backends.triton.kernels.norm_act import convert_input

    parts, weights = random_parts(2, head_dim, gpu)
    form = ActivationLayout(SUMS, unit, HEADS * head_dim // unit + 2)
    found = joined(parts, weights, None, form)
    rows = joined(parts, weights, None, ROWS_LAYOUT).rows[FIRST:]
    expected = convert_input(rows, form)
    assert_same_bits(found.rows[FIRST:], expected.rows)
    # One number that a GPU rounds otherwise moves a sum by a step of float16.
    bound = {"rtol": 0, "atol": 2**-10 * rows.abs().max().item()} if gpu.type == "cuda" else {}
    torch.testing.assert_close(found.beside[:, FIRST:], expected.beside, **bound)
    assert (found.beside[-1, FIRST:] == 0).all()

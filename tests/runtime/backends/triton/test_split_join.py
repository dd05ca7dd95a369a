"""Splits of attention joined in the form that the next product takes, against float64 and a conversion of their own."""

import pytest
import torch
from poisoned_memory import poisoned_allocations
from rounding import assert_same_bits

from runtime.backends.triton.fused_linear import ROWS_LAYOUT, SUMS, ActivationLayout

TOKENS, HEADS = 3, 3
"""The first token has one result, stored already."""


def random_parts(splits: int, head_dim: int, device: torch.device):
    """Parts and the logarithms of their weights, by token and split. Some splits saw nothing, and one row nothing at
    all."""
    generator = torch.Generator().manual_seed(splits)
    parts = torch.randn(TOKENS - 1, splits, HEADS, head_dim, generator=generator)
    weights = torch.randn(TOKENS - 1, splits, HEADS, generator=generator) * 4
    weights[:, : splits - 1 : 7] = float("-inf")
    weights[1, :, 2] = float("-inf")
    parts[weights == float("-inf")] = float("nan")
    return parts.to(device), weights.to(device)


def joined(parts, weights, sinks, form):
    from runtime.backends.triton.kernels.norm_act import empty_input
    from runtime.backends.triton.kernels.split_join import join
    from runtime.backends.triton.kernels.tile_list import TileList

    _, splits, _, head_dim = parts.shape
    with poisoned_allocations():
        out = empty_input(parts, TOKENS, HEADS * head_dim, form, torch.float16)
    stored = torch.linspace(-2, 2, HEADS * head_dim).half().to(parts.device)
    out.rows[0] = stored
    places = torch.tensor([[7, 0], [0, splits], [splits, splits]], dtype=torch.int32, device=parts.device)
    tiles = TileList(places, places, 2 * splits, splits)
    join(parts.flatten(0, 1), weights.flatten(0, 1), tiles, sinks, out, form)
    assert torch.equal(out.rows[0], stored)
    return out


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("splits", "head_dim"), [(5, 64), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((1, 32), (33, 32)))]
)
def test_against_float64(gpu, splits: int, head_dim: int, has_sinks: bool) -> None:
    parts, weights = random_parts(splits, head_dim, gpu)
    sinks = torch.linspace(-3, 5, HEADS).half().to(gpu) if has_sinks else None
    share = torch.exp2(weights.double())
    total = share.sum(1, keepdim=True) + (0 if sinks is None else sinks.double().exp())
    exact = (parts.nan_to_num().double() * (share / total.clamp(min=1e-30))[..., None]).sum(1)
    found = joined(parts, weights, sinks, ROWS_LAYOUT).rows[1:].view_as(exact).double()
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
    rows = joined(parts, weights, None, ROWS_LAYOUT).rows
    expected = convert_input(rows, form)
    assert_same_bits(found.rows, expected.rows)
    # One number that a GPU rounds otherwise moves a sum by a step of float16.
    bound = {"rtol": 0, "atol": 2**-10 * rows.abs().max().item()} if gpu.type == "cuda" else {}
    torch.testing.assert_close(found.beside, expected.beside, **bound)
    assert (found.beside[-1] == 0).all()

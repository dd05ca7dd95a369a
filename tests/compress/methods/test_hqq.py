"""HQQ: never worse than round to nearest in its own norm, for every scheme, and forgiving of outliers."""

import pytest
import torch
from torch import Tensor

from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import NumericsError
from compress.methods.hqq import Splitting, norm_error, quantize_hqq

SCHEMES = [Int(bits, group, symmetric) for bits in (2, 3, 4) for group in (64, None) for symmetric in (True, False)]


@pytest.fixture
def weight() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    heavy = torch.randn(96, 256, generator=generator).pow(3)
    return 0.02 * torch.randn(96, 256, generator=generator) + 0.001 * heavy


def errors(weight: Tensor, packed: CodedWeight, exponent: float = Splitting().exponent) -> Tensor:
    """`[O, G, 1]`"""
    change = packed.dequantize(torch.float32) - weight
    return norm_error(change.unflatten(1, (packed.scales.shape[1], -1)), exponent)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_group_is_worse_than_round_to_nearest(scheme: Scheme, weight: Tensor) -> None:
    before = weight.clone()
    packed = quantize_hqq(weight, scheme)
    fitted, nearest = errors(weight, packed), errors(weight, scheme.round(weight))
    # Codes are chosen by a division here and by a product with the reciprocal in the search: half steps may differ.
    assert bool((fitted <= nearest * (1 + 1e-4)).all())
    assert float(fitted.sum()) < 0.999 * float(nearest.sum())
    assert torch.equal(weight, before)
    assert packed.scales.dtype == torch.bfloat16
    assert int(packed.qweight.max()) <= scheme.max_code
    if scheme.symmetric:
        assert bool((packed.zero_points == scheme.zero).all())


def test_one_outlier_does_not_widen_the_grid() -> None:
    weight = torch.linspace(-1, 1, 64).repeat(1, 1)
    weight[0, 63] = 8.0
    scheme = Int(3, 64, symmetric=False)
    typical = (quantize_hqq(weight, scheme).dequantize() - weight).abs()[0, :63].mean()
    nearest = (scheme.round(weight).dequantize() - weight).abs()[0, :63].mean()
    assert float(typical) < 0.7 * float(nearest)


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_zeros_stay_zero(symmetric: bool, weight: Tensor) -> None:
    weight[:, :64] = 0
    packed = quantize_hqq(weight, Int(3, 64, symmetric))
    assert bool((packed.dequantize()[:, :64] == 0).all())
    assert bool(torch.isfinite(packed.scales).all())


def test_zeros_of_pruning_stay_zero(weight: Tensor) -> None:
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5] = 0
    for symmetric in (True, False):
        packed = quantize_hqq(weight, Int(4, 64, symmetric))
        assert bool((packed.dequantize()[weight == 0] == 0).all())


def test_the_same_weight_gives_the_same_codes(weight: Tensor) -> None:
    first, second = (quantize_hqq(weight, Int(4, 64, False)) for _ in range(2))
    assert torch.equal(first.qweight, second.qweight)
    assert torch.equal(first.scales, second.scales)


def test_numbers_that_are_none_are_refused(weight: Tensor) -> None:
    weight[3, 5] = torch.nan
    with pytest.raises(NumericsError):
        quantize_hqq(weight, Int(4, 64))

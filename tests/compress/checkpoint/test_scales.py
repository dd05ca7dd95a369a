"""The scale search against brute force, at every width, grouping and symmetry."""

import pytest
import torch
from torch import Tensor

from compress.checkpoint.scale_search import encode, range_scales, round_in_range, search_scales
from compress.checkpoint.weights import Int, Scheme
from compress.common.errors import NumericsError, SchemeError


def heavy_tailed(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return normal * torch.exp(0.5 * torch.randn(rows, columns, generator=generator)) * 0.02


def uneven_importance(columns: int, seed: int = 1) -> Tensor:
    return torch.exp(2 * torch.randn(columns, generator=torch.Generator().manual_seed(seed)))


def group_errors(weight: Tensor, restored: Tensor, importance: Tensor, groups: int) -> Tensor:
    error = (weight.double() - restored.double()).square() * importance.double()
    return error.unflatten(1, (groups, -1)).sum(-1)


def brute_force_errors(weight: Tensor, importance: Tensor, scheme: Scheme) -> Tensor:
    """Least error of each group `[O, G]` over 600 stored scales of both signs and every integer zero point."""
    groups = weight.double().unflatten(1, (scheme.num_groups(weight.shape[1]), -1))
    weights = importance.double().view(1, groups.shape[1], -1)
    span = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    zeros = [scheme.zero] if scheme.symmetric else range(scheme.max_code + 1)
    least = torch.full(span.shape, torch.inf, dtype=torch.float64)
    for fraction in torch.linspace(0.1, 2.1, 600).tolist():
        for sign in (1, -1) if scheme.symmetric else (1,):
            scale = (sign * fraction * span / scheme.max_code).to(torch.bfloat16).double().unsqueeze(-1)
            for zero in zeros:
                codes = (groups / scale + zero).round().clamp(0, scheme.max_code)
                error = (((codes - zero) * scale - groups).square() * weights).sum(-1)
                least = torch.minimum(least, error)
    return least


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("weighted", [True, False])
def test_search_is_close_to_brute_force(bits: int, symmetric: bool, weighted: bool) -> None:
    weight = heavy_tailed(6, 128)
    importance = uneven_importance(128) if weighted else torch.ones(128)
    scheme = Int(bits, 32, symmetric)
    found = encode(weight, search_scales(weight, scheme, importance if weighted else None), scheme)
    errors = group_errors(weight, found.dequantize(torch.float64), importance, 4)
    best = brute_force_errors(weight, importance, scheme)
    assert (errors >= best * 0.99).all()
    assert errors.sum() <= best.sum() * 1.08


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("bits", range(2, 9))
def test_search_never_loses_to_the_plain_range(bits: int, group_size: int | None, symmetric: bool) -> None:
    weight, importance = heavy_tailed(24, 256), uneven_importance(256)
    scheme = Int(bits, group_size, symmetric)
    groups = scheme.num_groups(256)
    searched = encode(weight, search_scales(weight, scheme, importance), scheme)
    plain = encode(weight, range_scales(weight, scheme), scheme)
    assert searched.qweight.max() <= scheme.max_code
    assert torch.isfinite(searched.scales).all()
    assert (searched.scales != 0).all()
    if symmetric:
        assert (searched.zero_points == scheme.zero).all()
    better = group_errors(weight, searched.dequantize(), importance, groups)
    worse = group_errors(weight, plain.dequantize(), importance, groups)
    assert (better <= worse * 1.001 + 1e-12).all()
    assert better.sum() < worse.sum()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_in_the_plain_range_skips_no_step(bits: int, symmetric: bool) -> None:
    weight, scheme = heavy_tailed(40, 128), Int(bits, 64, symmetric)
    expected = encode(weight, range_scales(weight, scheme), scheme).dequantize()
    found = round_in_range(weight.to(torch.float64), scheme)
    assert found.dtype == torch.float32
    assert (found != expected).float().mean() < 1e-3, "only a rounding tie may fall the other way"


def test_enormous_and_minute_weights_keep_finite_scales() -> None:
    for magnitude in (1e30, 1e-30):
        weight = heavy_tailed(4, 64) * magnitude
        coded = encode(weight, search_scales(weight, Int(4, 32)), Int(4, 32))
        assert torch.isfinite(coded.scales).all()
        assert (coded.scales != 0).all()
        assert (coded.dequantize() - weight).norm(dtype=torch.float64) < 0.2 * weight.norm(dtype=torch.float64)


def test_signed_full_range_reaches_the_largest_element_on_either_side() -> None:
    rising = torch.tensor([[0.1, 0.2, -0.3, 0.8]]).repeat(1, 8)
    for weight in (rising, -rising):
        scales = range_scales(weight, Int(4, 32, True))
        coded = encode(weight, scales, Int(4, 32, True))
        assert coded.qweight[0, 3] == 0, "the element of largest magnitude takes the code -8"
        assert scales.scales.sign().item() == -weight[0, 3].sign()


def test_negative_scales_are_found_when_they_pay() -> None:
    weight = torch.full((1, 32), -0.7)
    weight[0, 0] = 0.8
    for each in (weight, -weight):
        coded = encode(each, search_scales(each, Int(2, 32, True)), Int(2, 32, True))
        assert (coded.dequantize() - each).square().mean() < 0.1


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_groups_of_zeros_get_a_harmless_scale(symmetric: bool, dtype: torch.dtype) -> None:
    weight = torch.zeros(4, 64)
    weight[0, 32:] = torch.linspace(-1, 1, 32)
    weight[1, :32] = 1e-42
    scheme = Int(4, 32, symmetric)
    coded = encode(weight, search_scales(weight, scheme, scale_dtype=dtype), scheme)
    assert coded.scales.dtype == dtype
    assert torch.isfinite(coded.scales).all()
    assert (coded.scales != 0).all()
    assert (coded.dequantize()[2:] == 0).all()


def test_small_weights_survive_float16_scales() -> None:
    weight = heavy_tailed(8, 64) * 0.01
    coded = encode(weight, search_scales(weight, Int(8, 32), scale_dtype=torch.float16), Int(8, 32))
    assert (coded.dequantize() - weight).norm() < 0.02 * weight.norm()


def test_asymmetric_ranges_store_zero_exactly() -> None:
    weight = heavy_tailed(8, 64).abs() + 0.01
    weight[:, ::2] = 0
    scheme = Int(3, 32, False)
    restored = encode(weight, search_scales(weight, scheme), scheme).dequantize()
    assert (restored[:, ::2] == 0).all()


def test_scales_are_judged_as_they_are_stored() -> None:
    """Codes are the nearest ones under the rounded scale, so re-encoding what was stored changes nothing."""
    weight = heavy_tailed(32, 128)
    for scheme in (Int(8, 64, True), Int(8, 64, False), Int(4, 64, True)):
        scales = search_scales(weight, scheme)
        coded = encode(weight, scales, scheme)
        exact = weight.double().unflatten(1, (2, -1)) / scales.scales.double().unsqueeze(-1)
        nearest = (exact + scales.zero_points.double().unsqueeze(-1)).round().clamp(0, scheme.max_code).flatten(1)
        assert (nearest != coded.qweight).float().mean() < 1e-3
        again = encode(coded.dequantize(), scales, scheme)
        assert torch.equal(again.qweight, coded.qweight)


def test_search_on_inputs_minimises_the_groups_output_error() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = heavy_tailed(16, 64)
    inputs = torch.randn(300, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    scheme = Int(3, 32, True)

    def output_error(restored: Tensor) -> float:
        change = (restored - weight).unflatten(1, (2, -1))
        outputs = torch.einsum("ogi,tgi->otg", change, inputs.unflatten(1, (2, -1)))
        return outputs.square().sum().item()

    by_outputs = encode(weight, search_scales(weight, scheme, inputs=inputs), scheme)
    by_moments = encode(weight, search_scales(weight, scheme, inputs.square().mean(0)), scheme)
    assert output_error(by_outputs.dequantize()) < 0.9 * output_error(by_moments.dequantize())


def test_chunking_over_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scheme = heavy_tailed(40, 128), Int(4, 64, True)
    whole = search_scales(weight, scheme)
    monkeypatch.setattr("compress.checkpoint.scale_search._CHUNK_ELEMENTS_CPU", 3 * 128)
    chunked = search_scales(weight, scheme)
    assert torch.equal(whole.scales, chunked.scales)
    assert torch.equal(whole.zero_points, chunked.zero_points)


def test_16_bit_weights_are_accepted() -> None:
    weight = heavy_tailed(8, 64).to(torch.bfloat16)
    coded = encode(weight, search_scales(weight, Int(4, 32)), Int(4, 32))
    same = encode(weight.float(), search_scales(weight.float(), Int(4, 32)), Int(4, 32))
    assert torch.equal(coded.qweight, same.qweight)


def test_refusals() -> None:
    weight = heavy_tailed(4, 64)
    broken = weight.clone()
    broken[1, 2], broken[3, 4] = torch.nan, torch.inf
    with pytest.raises(NumericsError, match=r"2 NaN.*256"):
        search_scales(broken, Int(4, 32))
    with pytest.raises(NumericsError, match="importance"):
        search_scales(weight, Int(4, 32), torch.full((64,), torch.nan))
    with pytest.raises(SchemeError, match=r" 48 .* 64 .*--ignore"):
        search_scales(weight, Int(4, 48))

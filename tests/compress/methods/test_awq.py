"""AWQ's two searches against brute force in float64, and its guarantees."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compress.checkpoint.scale_search import encode, range_scales
from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import NumericsError
from compress.methods.awq import quantize_awq, search_smoothing
from compress.methods.base import ScaleSearch
from compress.methods.shared.smoothing import SmoothingResult


def outlier_inputs(tokens: int, columns: int, seed: int = 0, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=generator) * torch.exp(
        spread * torch.randn(columns, generator=generator)
    )


def random_weight(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def fake_quantizer(scheme: Scheme) -> Callable[[Tensor], Tensor]:
    return lambda weight: encode(weight, range_scales(weight, scheme), scheme).dequantize()


def output_loss(weights: list[Tensor], inputs: Tensor) -> Callable[[list[Tensor], Tensor | None], float]:
    def loss(changed: list[Tensor], _scale: Tensor | None = None) -> float:
        errors = [(inputs @ (new - old).T).square().mean() for new, old in zip(changed, weights, strict=True)]
        return float(sum(errors))

    return loss


def smooth(
    weights: list[Tensor],
    abs_mean: Tensor,
    quantize: Callable[[Tensor], Tensor],
    loss: Callable[..., float],
    num_ratios: int = 20,
    **layout: int | None,
) -> SmoothingResult:
    search = ScaleSearch(weights, SimpleNamespace(abs_mean=abs_mean), quantize, loss, **layout)
    return search_smoothing(search, num_ratios)


def brute_force_smoothing(
    weights: list[Tensor], inputs: Tensor, scheme: Scheme, num_ratios: int
) -> list[tuple[float, float, bool]]:
    """(loss, ratio, duo) of every grid point, from the paper's definitions, element by element in float64."""
    group_size, columns = scheme.group_size or weights[0].shape[1], weights[0].shape[1]
    x = inputs.double().abs().mean(0)
    relative = []
    for weight in weights:
        for row in weight.double():
            peaks = torch.cat([part.abs().max().expand(group_size) for part in row.split(group_size)])
            relative.append(row.abs() / peaks)
    w = torch.stack(relative).mean(0)
    points = []
    for step in range(num_ratios + 1):
        ratio = step / num_ratios
        for duo in (False, True):
            scale = x**ratio / (w ** (1 - ratio) + 1e-4) if duo else x**ratio
            scale = scale / (scale.max() * scale.min()).sqrt()
            total = 0.0
            for weight in weights:
                smoothed = weight.double() * scale
                restored = fake_quantizer(scheme)(smoothed.float()).double() / scale
                total += (inputs.double() @ (restored - weight.double()).T).square().mean().item()
            points.append((total, ratio, duo))
    assert len(scale) == columns
    return points


@pytest.mark.parametrize("scheme", [Int(4, 64), Int(3, 32, False), Int(4, None)], ids=str)
def test_smoothing_finds_the_best_grid_point(scheme: Scheme) -> None:
    inputs = outlier_inputs(256, 128)
    weights = [random_weight(32, 128, 1), random_weight(16, 128, 2)]
    result = smooth(
        weights,
        inputs.abs().mean(0),
        fake_quantizer(scheme),
        output_loss(weights, inputs),
        num_ratios=10,
        group_size=scheme.group_size,
    )
    points = brute_force_smoothing(weights, inputs, scheme, 10)
    identity = next(loss for loss, ratio, duo in points if ratio == 0 and not duo)
    best = min(points)
    assert result.loss_before == pytest.approx(identity, rel=1e-3)
    assert result.loss_after == pytest.approx(best[0], rel=1e-3)
    assert (result.ratio, result.duo) == best[1:] or best[1] == 1.0
    assert result.loss_after < 0.8 * result.loss_before


def test_few_scales_are_tried() -> None:
    weight, inputs, tried = random_weight(16, 64, 0), outlier_inputs(64, 64), []

    def loss(_weights: list[Tensor], scale: Tensor) -> float:
        tried.append(scale)
        return float((scale - 1).square().sum() + 1)

    smooth([weight], inputs.abs().mean(0), lambda weight: weight, loss, num_ratios=10, group_size=32)
    assert 10 < len(tried) <= 15


def test_identity_is_kept_when_nothing_is_better() -> None:
    """With even inputs and weights that are exact on their grid, any scale can only hurt."""
    weight = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(0)).float()
    weight[:, ::32] = -8
    inputs = outlier_inputs(64, 64)
    result = smooth(
        [weight], inputs.abs().mean(0), fake_quantizer(Int(4, 32)), output_loss([weight], inputs), group_size=32
    )
    assert torch.equal(result.scale, torch.ones(64))
    assert (result.ratio, result.duo) == (0.0, False)
    assert result.loss_after == result.loss_before


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_smoothing_is_never_worse_than_none(bits: int, seed: int) -> None:
    scheme, inputs, weight = Int(bits, 64), outlier_inputs(128, 128, seed, 0.3), random_weight(16, 128, seed)
    loss = output_loss([weight], inputs)
    result = smooth([weight], inputs.abs().mean(0), fake_quantizer(scheme), loss, 5, group_size=64)
    restored = fake_quantizer(scheme)(weight * result.scale) / result.scale
    assert loss([restored]) == pytest.approx(result.loss_after, rel=1e-5)
    assert result.loss_after <= result.loss_before
    assert result.scale.max() * result.scale.min() == pytest.approx(1.0, rel=1e-3)


def test_query_heads_of_one_value_head_share_their_scale() -> None:
    inputs, weight = outlier_inputs(128, 4 * 16), random_weight(32, 4 * 16)
    result = smooth(
        [weight],
        inputs.abs().mean(0),
        fake_quantizer(Int(3, 32)),
        output_loss([weight], inputs),
        group_size=32,
        heads_per_group=2,
        head_dim=16,
    )
    assert result.loss_after < result.loss_before
    heads = result.scale.view(2, 2, 16)
    assert torch.equal(heads[:, 0], heads[:, 1])


def test_silent_inputs_and_wild_magnitudes_keep_scales_finite() -> None:
    weight, scheme = random_weight(8, 64), Int(4, 32)
    for magnitude in (torch.zeros(64), torch.logspace(-30, 30, 64), torch.eye(64)[0]):
        inputs = magnitude.clamp(max=1e4) * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        result = smooth([weight], magnitude, fake_quantizer(scheme), output_loss([weight], inputs))
        assert torch.isfinite(result.scale).all()
        assert (result.scale > 0).all()


def group_output_errors(weight: Tensor, quantized: CodedWeight, inputs: Tensor) -> Tensor:
    """`[O, G]` in float64: squared error of each group's share of each output, token by token."""
    groups = quantized.scales.shape[1]
    change = (quantized.dequantize(torch.float64) - weight.double()).unflatten(1, (groups, -1))
    return torch.einsum("ogi,tgi->otg", change, inputs.double().unflatten(1, (groups, -1))).square().sum(1)


@pytest.mark.parametrize("tokens", [20, 400])
@pytest.mark.parametrize("scheme", [Int(3, 32), Int(2, 64), Int(4, None)], ids=str)
def test_ranges_beat_every_limit_of_the_released_recipe(scheme: Scheme, tokens: int) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = outlier_inputs(tokens, 128) @ (torch.eye(128) + 0.3 * torch.randn(128, 128, generator=generator))
    weight = random_weight(24, 128)
    groups = scheme.num_groups(128)
    found = quantize_awq(weight, scheme, inputs=inputs)
    errors = group_output_errors(weight, found, inputs)
    peaks = weight.unflatten(1, (groups, -1)).abs().amax(-1, keepdim=True)
    for step in range(10):
        limit = peaks * (1 - step / 20)
        clipped = weight.unflatten(1, (groups, -1)).clamp(-limit, limit).flatten(1)
        rival = encode(clipped, range_scales(clipped, scheme), scheme)
        assert errors.sum() < group_output_errors(weight, rival, inputs).sum()
    assert errors.sum() < 0.9 * group_output_errors(weight, scheme.round(weight), inputs).sum()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_scheme_is_at_least_as_good_as_rounding(bits: int, group_size: int | None, symmetric: bool) -> None:
    scheme = Int(bits, group_size, symmetric)
    inputs, weight = outlier_inputs(256, 128), random_weight(16, 128)
    loss = output_loss([weight], inputs)
    smoothing = smooth([weight], inputs.abs().mean(0), fake_quantizer(scheme), loss, 5, group_size=group_size)
    smoothed, eased = weight * smoothing.scale, inputs / smoothing.scale
    quantized = quantize_awq(smoothed, scheme, inputs=eased)
    again = quantize_awq(smoothed, scheme, inputs=eased)
    assert torch.equal(quantized.qweight, again.qweight)
    assert loss([quantized.dequantize() / smoothing.scale]) < loss([scheme.round(weight).dequantize()])


def test_without_ranges_the_importance_decides() -> None:
    weight, importance = random_weight(16, 64), outlier_inputs(64, 64).square().mean(0)
    by_awq = quantize_awq(weight, Int(4, 32), importance)
    assert torch.equal(by_awq.qweight, Int(4, 32).round(weight, importance).qweight)


def test_refusals() -> None:
    weight, inputs = random_weight(4, 64), outlier_inputs(16, 64)
    inputs[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r"sample .*\b1 .*1024"):
        quantize_awq(weight, Int(4, 32), inputs=inputs)
    with pytest.raises(NumericsError, match=r"magnitude .*\b1 .*64"):
        smooth([weight], inputs.abs().mean(0), lambda w: w, lambda w, s: 0.0)
    with pytest.raises(NumericsError, match=r"smoothing .*nan"):
        smooth([weight], torch.ones(64), lambda w: w, lambda w, s: float("nan"))
    weight[0, 0] = torch.inf
    with pytest.raises(NumericsError, match="weight"):
        quantize_awq(weight, Int(4, 32))

"""SmoothQuant's scale: the paper's formula, chosen by error, never worse than none."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compress.checkpoint.scale_search import quantize_tokens, round_in_range
from compress.checkpoint.weights import Activations, Int
from compress.common.errors import NumericsError
from compress.methods.base import ScaleSearch
from compress.methods.shared.smoothing import SmoothingResult
from compress.methods.smoothquant import ALPHAS, search_alpha

SCHEME = Int(8, None, activations=Activations.INT8)


def make_problem(outlier: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    inputs = torch.randn(200, 64, generator=generator)
    inputs[:, 7] *= outlier
    return weight, inputs


def w8a8_loss(weight: Tensor, inputs: Tensor):
    def loss(changed: list[Tensor], scale: Tensor) -> float:
        q8, steps = quantize_tokens(inputs / scale)
        return float(((q8 * steps * scale) @ changed[0].T - inputs @ weight.T).square().mean())

    return loss


def fake_quantize(weight: Tensor) -> Tensor:
    return round_in_range(weight, SCHEME)


def search(
    weights: list[Tensor],
    abs_max: Tensor,
    loss: Callable[[list[Tensor], Tensor], float],
    alphas: Sequence[float] = ALPHAS,
    insist: bool = False,
    **heads: int,
) -> SmoothingResult:
    statistics = SimpleNamespace(abs_max=abs_max)
    return search_alpha(ScaleSearch(weights, statistics, fake_quantize, loss, **heads), alphas, insist)


def test_an_outlier_channel_is_divided_out() -> None:
    weight, inputs = make_problem(100.0)
    result = search([weight], inputs.abs().amax(0), w8a8_loss(weight, inputs))
    assert result.applies
    assert result.ratio in ALPHAS
    assert result.loss_after < 0.1 * result.loss_before
    assert result.scale[7] > 5 * result.scale.median()


def test_a_fixed_alpha_is_the_paper_s_formula_over_all_readers() -> None:
    weight, inputs = make_problem(10.0)
    other = 3 * weight.flip(0)
    abs_max = inputs.abs().amax(0)
    result = search([weight, other], abs_max, lambda w, s: float(s.std()), (0.5,), insist=True)
    expected = abs_max.sqrt() / torch.maximum(weight.abs().amax(0), other.abs().amax(0)).sqrt()
    torch.testing.assert_close(result.scale, expected)
    assert result.loss_after > result.loss_before
    assert result.applies


def test_a_search_that_finds_nothing_better_changes_nothing() -> None:
    weight, inputs = make_problem(1.0)
    result = search([weight], inputs.abs().amax(0), lambda w, s: float((s - 1).abs().sum()))
    assert not result.applies
    assert torch.equal(result.scale, torch.ones(64))


def test_query_heads_on_one_value_head_share_their_scale() -> None:
    weight, inputs = make_problem(50.0)
    loss = w8a8_loss(weight, inputs)
    abs_max = inputs.abs().amax(0)
    result = search([weight], abs_max, loss, (0.5,), insist=True, heads_per_group=2, head_dim=16)
    heads = result.scale.view(2, 2, 16)
    torch.testing.assert_close(heads[:, 0], heads[:, 1])


def test_a_channel_that_is_never_excited_stays_finite() -> None:
    weight, inputs = make_problem(1.0)
    inputs[:, 3] = 0
    weight[:, 5] = 0
    result = search([weight], inputs.abs().amax(0), w8a8_loss(weight, inputs), (0.9,), insist=True)
    assert torch.isfinite(result.scale).all()
    assert (result.scale > 0).all()


def test_what_is_not_finite_is_refused() -> None:
    weight, inputs = make_problem(1.0)
    with pytest.raises(NumericsError, match=r"magnitude .*64"):
        search([weight], torch.full((64,), float("nan")), w8a8_loss(weight, inputs))

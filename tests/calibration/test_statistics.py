"""Streaming input statistics against their definitions in float64."""

import pytest
import torch
from torch import Tensor

from calibration.statistics import InputStatistics, RowSample, full_float32
from compress.common.errors import NumericsError


def activations(tokens: int, features: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, features, generator=generator) * torch.exp(torch.randn(features, generator=generator))


@pytest.mark.parametrize("features", [48, 700, 1100])
def test_sums_match_their_definitions(features: int) -> None:
    inputs = activations(330, features)
    statistics = InputStatistics(features)
    for batch in (inputs[:100].view(2, 50, features), inputs[100:101], inputs[101:]):
        statistics.update(batch)
    exact = inputs.double()
    hessian = statistics.hessian
    assert statistics.count == 330
    assert hessian.dtype == torch.float32
    assert torch.equal(hessian, hessian.T)
    torch.testing.assert_close(hessian.double(), 2 * exact.T @ exact / 330, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics.abs_mean.double(), exact.abs().mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(statistics.mean_square.double(), exact.square().mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(statistics.mean_square, hessian.diagonal() / 2, rtol=1e-4, atol=0)


def test_16_bit_inputs_are_summed_in_float32() -> None:
    inputs = activations(4000, 32).to(torch.bfloat16)
    statistics = InputStatistics(32)
    statistics.update(inputs)
    exact = inputs.double()
    torch.testing.assert_close(statistics.abs_mean.double(), exact.abs().mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(statistics.hessian.double(), 2 * exact.T @ exact / 4000, rtol=1e-4, atol=1e-3)


def test_batching_does_not_change_the_sample() -> None:
    rows = torch.arange(1000.0).unsqueeze(1)
    samples = []
    for size in (1, 7, 64, 1000):
        sample = RowSample(32)
        for batch in rows.split(size):
            sample.update(batch)
        samples.append(sample.take(16).flatten().tolist())
    assert all(each == samples[0] for each in samples)
    assert len(samples[0]) == 16
    assert samples[0][0] == 0
    assert samples[0][-1] > 900, "the sample reaches to the end of the stream"
    gaps = torch.tensor(samples[0]).diff()
    assert gaps.max() <= 2 * gaps.min()


def test_a_short_stream_is_its_own_sample() -> None:
    statistics = InputStatistics(8, hessian=False, sample_rows=64)
    inputs = activations(20, 8).to(torch.bfloat16)
    statistics.update(inputs)
    assert torch.equal(statistics.sample(64), inputs)
    assert statistics.sample(5).shape == (5, 8)


def test_what_was_not_asked_for_is_not_there() -> None:
    statistics = InputStatistics(8, hessian=False)
    statistics.update(activations(4, 8))
    with pytest.raises(ValueError, match="Hessian"):
        _ = statistics.hessian
    with pytest.raises(ValueError, match="sample"):
        statistics.sample(4)


def test_no_tokens_give_zeros_and_not_nan() -> None:
    statistics = InputStatistics(8)
    assert (statistics.hessian == 0).all()
    assert (statistics.abs_mean == 0).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_inputs_are_refused_by_name(broken: float) -> None:
    statistics = InputStatistics(8, "model.layers.3.mlp.down_proj")
    statistics.update(activations(5, 8))
    inputs = activations(4, 8)
    inputs[2, 3] = broken
    with pytest.raises(NumericsError, match=r"model\.layers\.3\.mlp\.down_proj.*1 NaN.*32"):
        statistics.update(inputs)
    assert statistics.count == 5
    assert torch.isfinite(statistics.hessian).all()


def test_reduced_precision_products_are_off_while_summing() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)

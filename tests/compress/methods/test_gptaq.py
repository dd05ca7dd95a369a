"""GPTAQ: the column loop of the paper, written out slowly in float64, chooses the same codes."""

import pytest
import torch
from torch import Tensor

from calibration.statistics import InputDifference
from compress.checkpoint.scale_search import GroupScales, search_scales
from compress.checkpoint.weights import Int, Scheme
from compress.methods.gptaq import DriftedFactor
from compress.methods.gptq import quantize_gptq
from compress.methods.shared.hessian import HessianOptions, factorize

OUTPUTS, INPUTS, TOKENS = 48, 64, 400
DAMPING = HessianOptions().damping[0]


@pytest.fixture(scope="module")
def layer() -> tuple[Tensor, Tensor, Tensor]:
    """Weight `[O, I]`, inputs `[T, I]` in the quantized model and in the dense one."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(INPUTS, INPUTS, generator=generator)
    dense = torch.randn(TOKENS, INPUTS, generator=generator) @ mix
    noise = torch.randn(TOKENS, INPUTS, generator=generator) @ mix * torch.rand(INPUTS, generator=generator)
    return torch.randn(OUTPUTS, INPUTS, generator=generator), dense + 0.3 * noise, dense


def moments(inputs: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * inputs.T @ inputs / len(inputs), 2 * (dense - inputs).T @ inputs / len(inputs)


def paper(
    weight: Tensor,
    hessian: Tensor,
    difference: Tensor,
    order: Tensor,
    scales: GroupScales,
    scheme: Scheme,
    alpha: float,
) -> Tensor:
    """Codes `[O, I]` by the update of the paper: the column, its error, and its share of the missing output."""
    hessian, difference = (each.double()[order][:, order] for each in (hessian, difference))
    hessian = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(order))
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    projections = alpha * torch.triu(difference @ upper.T, 1) @ upper
    columns = weight.double()[:, order]
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for step, column in enumerate(order.tolist()):
        group = column * scales.scales.shape[1] // len(order)
        scale, zero = scales.scales[:, group].double(), scales.zero_points[:, group].double()
        value = columns[:, step].clone()
        code = (value / scale + zero).round().clamp(0, scheme.max_code)
        codes[:, column] = code.to(torch.uint8)
        error = (value - (code - zero) * scale) / upper[step, step]
        columns[:, step:] -= error.outer(upper[step, step:])
        columns[:, step:] += value.outer(projections[step, step:])
    return codes


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("scheme", [Int(3, 32), Int(4, None, symmetric=False)], ids=str)
def test_codes_are_those_of_the_papers_formula(layer, scheme: Scheme, alpha: float) -> None:
    weight, inputs, dense = layer
    hessian, difference = moments(inputs, dense)
    factor = factorize(hessian)
    drifted = DriftedFactor.of(factor, difference, alpha)
    packed = drifted.quantize(weight, scheme, torch.float32)
    scales = search_scales(drifted.targets(weight), scheme, factor.importance, torch.float32)
    expected = paper(weight, hessian, difference, factor.order, scales, scheme, alpha)
    assert float((packed.qweight != expected).float().mean()) < 0.001


def test_without_a_difference_it_is_gptq(layer) -> None:
    weight, inputs, _ = layer
    factor, scheme = factorize(2 * inputs.T @ inputs / TOKENS), Int(3, 32)
    plain = quantize_gptq(weight, factor, scheme)
    for difference, alpha in ((torch.zeros(INPUTS, INPUTS), 1.0), (torch.randn(INPUTS, INPUTS), 0.0)):
        packed = DriftedFactor.of(factor, difference, alpha).quantize(weight, scheme)
        assert packed.qweight.equal(plain.qweight)
        assert packed.scales.equal(plain.scales)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_dense_output_is_met_better_than_by_gptq(layer, bits: int) -> None:
    weight, inputs, dense = layer
    hessian, difference = moments(inputs, dense)
    factor, scheme = factorize(hessian), Int(bits, 32)
    packed = DriftedFactor.of(factor, difference).quantize(weight, scheme)
    plain = quantize_gptq(weight, factor, scheme)
    wanted = dense @ weight.T
    losses = [float((inputs @ each.dequantize().T - wanted).square().sum()) for each in (packed, plain)]
    assert losses[0] < losses[1]


def test_pruned_weights_stay_zero(layer) -> None:
    weight, inputs, dense = layer
    hessian, difference = moments(inputs, dense)
    kept = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    drifted = DriftedFactor.of(factorize(hessian), difference)
    packed = drifted.quantize(weight, Int(3, 32), kept=kept)
    assert bool((packed.dequantize()[~kept] == 0).all())


def test_inputs_that_were_never_excited_round_to_nearest(layer) -> None:
    weight = layer[0]
    drifted = DriftedFactor.of(factorize(torch.zeros(INPUTS, INPUTS)), torch.zeros(INPUTS, INPUTS))
    assert drifted.targets(weight) is weight
    assert drifted.quantize(weight, Int(4, 32)).qweight.shape == weight.shape


def test_differences_add_up_over_batches(layer) -> None:
    _, inputs, dense = layer
    whole, parts = InputDifference(INPUTS), InputDifference(INPUTS)
    whole.update(inputs, dense)
    for left, right in zip(inputs.view(4, -1, 5, INPUTS), dense.view(4, -1, 5, INPUTS), strict=True):
        parts.update(left, right)
    torch.testing.assert_close(whole.moment, moments(inputs, dense)[1], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(parts.moment, whole.moment, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match=f"{len(inputs)}, .*{len(inputs) - 1}, "):
        whole.update(inputs, dense[1:])

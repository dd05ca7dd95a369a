"""GPTQ against a slow float64 reference of the paper's update, its orderings and its failure ladder."""

import pytest
import torch
from torch import Tensor

from compress.checkpoint.scale_search import encode, range_scales, search_scales
from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import NumericsError, SchemeError
from compress.methods.gptq import quantize_gptq
from compress.methods.shared.hessian import HessianOptions, factorize

PLAIN = HessianOptions(activation_order=False)


def correlated_inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Heavy-tailed channel magnitudes on top of correlated features, as transformers have them."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    mixing = mixing * torch.rand(columns, 1, generator=generator).square() + 0.3 * torch.eye(columns)
    inputs = torch.randn(tokens, columns, generator=generator) @ mixing
    return inputs * torch.exp(torch.randn(columns, generator=generator))


def random_weight(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def hessian_of(inputs: Tensor) -> Tensor:
    return 2 * inputs.T @ inputs / len(inputs)


def output_error(weight: Tensor, quantized: CodedWeight, inputs: Tensor) -> float:
    change = (quantized.dequantize() - weight) @ inputs.T
    return (change.square().sum() / (weight @ inputs.T).square().sum()).item()


def loss(weight: Tensor, restored: Tensor, hessian: Tensor) -> float:
    change = restored.double() - weight.double()
    return ((change @ hessian.double()) * change).sum().item()


def optimal_brain_quantizer(weight: Tensor, hessian: Tensor, options: HessianOptions, scheme: Scheme) -> Tensor:
    """Codes by the paper's equations 2 and 3: after each column, the others move by `-err / [H^-1]_qq * H^-1_q,:`,
    and q is eliminated from the inverse Hessian."""
    damped = hessian.double() + options.damping[0] * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    order = torch.arange(len(hessian))
    if options.activation_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    inputs = factorize(hessian, options).equivalent_inputs() if scheme.bits == 2 and scheme.group_size else None
    scales = search_scales(weight, scheme, hessian.diagonal(), inputs=inputs)
    group_of = torch.arange(len(hessian)) // (len(hessian) // scales.scales.shape[1])
    inverse = torch.linalg.inv(damped)
    work, codes = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.uint8)
    for column in order.tolist():
        scale, zero = scales.scales[:, group_of[column]].double(), scales.zero_points[:, group_of[column]].double()
        code = ((work[:, column] / scale).round() + zero).clamp(0, scheme.max_code)
        error = work[:, column] - (code - zero) * scale
        work -= torch.outer(error, inverse[column] / inverse[column, column])
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        # The eliminated row is exactly 0 in exact arithmetic; keep it out of later updates.
        inverse[column], inverse[:, column] = 0, 0
        codes[:, column] = code.to(torch.uint8)
        inverse[column, column] = 1
    return codes


@pytest.mark.parametrize("options", [HessianOptions(), PLAIN], ids=["activation order", "plain order"])
@pytest.mark.parametrize("scheme", [Int(4, 32), Int(3, 64, False), Int(2, 32), Int(2, None), Int(8, 128)], ids=str)
def test_codes_are_those_of_the_paper(scheme: Scheme, options: HessianOptions) -> None:
    inputs, weight = correlated_inputs(1024, 128), random_weight(48, 128)
    hessian = hessian_of(inputs)
    expected = optimal_brain_quantizer(weight, hessian, options, scheme)
    found = quantize_gptq(weight, factorize(hessian, options), scheme)
    # A code at a rounding tie may fall either way, and then carries the columns after it in its row along.
    assert (found.qweight != expected).float().mean() < 0.01
    assert (found.qweight != expected).any(1).float().mean() < 0.1
    reference = scheme.weight(expected, found.scales, found.zero_points)
    ours, theirs = (loss(weight, each.dequantize(), hessian) for each in (found, reference))
    assert ours == pytest.approx(theirs, rel=5e-3)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_scheme_beats_rounding(bits: int, group_size: int | None, symmetric: bool) -> None:
    inputs, weight = correlated_inputs(1024, 256), random_weight(32, 256)
    hessian = hessian_of(inputs)
    scheme = Int(bits, group_size, symmetric)
    found = quantize_gptq(weight, factorize(hessian), scheme)
    assert found.qweight.shape == weight.shape
    assert found.qweight.max() <= scheme.max_code
    rounded = scheme.round(weight, hessian.diagonal())
    assert output_error(weight, found, inputs) < 0.7 * output_error(weight, rounded, inputs)


@pytest.mark.parametrize("scheme", [Int(4, 32), Int(4, 128), Int(3, 128), Int(2, 64)], ids=str)
def test_each_default_earns_its_place(scheme: Scheme) -> None:
    """The ablation that supports the defaults: each step lowers the relative output error."""
    inputs, weight = correlated_inputs(2048, 256), random_weight(128, 256)
    hessian = hessian_of(inputs)
    plain_range = output_error(weight, encode(weight, range_scales(weight, scheme), scheme), inputs)
    rounded = output_error(weight, scheme.round(weight), inputs)
    weighted = output_error(weight, scheme.round(weight, hessian.diagonal()), inputs)
    in_order = output_error(weight, quantize_gptq(weight, factorize(hessian, PLAIN), scheme), inputs)
    by_activation = output_error(weight, quantize_gptq(weight, factorize(hessian), scheme), inputs)
    assert by_activation < 0.85 * in_order < 0.85 * weighted < 0.85 * rounded < 0.85 * plain_range


@pytest.mark.parametrize("options", [HessianOptions(), PLAIN], ids=["activation order", "plain order"])
def test_equivalent_inputs_have_the_damped_hessian_as_their_second_moments(options: HessianOptions) -> None:
    hessian = hessian_of(correlated_inputs(512, 96))
    rows = factorize(hessian, options).equivalent_inputs()
    assert rows is not None
    mean = hessian.diagonal().mean()
    torch.testing.assert_close(rows.T @ rows * mean, hessian + 0.01 * mean * torch.eye(96), rtol=1e-3, atol=1e-4)


def test_clipping_at_two_bits_sees_correlations() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = 1.0 + 0.5 * torch.randn(512, 64, generator=generator)
    weight, scheme = random_weight(64, 64).abs(), Int(2, 32)
    hessian = hessian_of(inputs)
    by_diagonal = encode(weight, search_scales(weight, scheme, hessian.diagonal()), scheme)
    found = quantize_gptq(weight, factorize(hessian), scheme)
    assert output_error(weight, found, inputs) < 0.2 * output_error(weight, by_diagonal, inputs)


def test_siblings_share_one_factor_and_rows_are_independent() -> None:
    inputs = correlated_inputs(512, 128)
    factor = factorize(hessian_of(inputs))
    query, key = random_weight(16, 128, 1), random_weight(24, 128, 2)
    together = quantize_gptq(torch.cat([query, key]), factor, Int(4, 64))
    apart = torch.cat([quantize_gptq(each, factor, Int(4, 64)).qweight for each in (query, key)])
    assert (together.qweight != apart).float().mean() < 1e-3


def test_same_input_gives_the_same_bits() -> None:
    inputs, weight = correlated_inputs(512, 128), random_weight(32, 128)
    runs = [quantize_gptq(weight, factorize(hessian_of(inputs)), Int(3, 64)) for _ in range(2)]
    assert torch.equal(runs[0].qweight, runs[1].qweight)
    assert torch.equal(runs[0].scales, runs[1].scales)


def test_a_rank_deficient_hessian_needs_no_recovery() -> None:
    inputs, weight = correlated_inputs(20, 128), random_weight(16, 128)
    factor = factorize(hessian_of(inputs))
    assert (factor.damping, factor.recovery) == (0.01, "")
    rounded = output_error(weight, Int(4, 64).round(weight), inputs)
    assert output_error(weight, quantize_gptq(weight, factor, Int(4, 64)), inputs) < 0.1 * rounded


@pytest.mark.parametrize("magnitude", [1e-18, 1e-6, 1e6, 1e17])
def test_the_unit_of_the_inputs_does_not_matter(magnitude: float) -> None:
    inputs, weight = correlated_inputs(512, 64), random_weight(16, 64)
    usual = quantize_gptq(weight, factorize(hessian_of(inputs)), Int(4, 32))
    scaled = factorize(hessian_of(inputs) * magnitude**2)
    assert scaled.recovery == ""
    assert (quantize_gptq(weight, scaled, Int(4, 32)).qweight != usual.qweight).float().mean() < 0.01


def test_a_huge_condition_number_still_factorizes() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64)).Q
    hessian = ((basis * torch.logspace(-15, 10, 64, dtype=torch.float64)) @ basis.T).float()
    factor = factorize(hessian)
    assert factor.feedback is not None
    assert torch.isfinite(factor.feedback).all()
    found = quantize_gptq(random_weight(8, 64), factor, Int(4, 32))
    assert torch.isfinite(found.dequantize()).all()


def test_dead_columns_are_rounded_and_disturb_nothing() -> None:
    inputs, weight = correlated_inputs(512, 128), random_weight(16, 128)
    dead = torch.zeros(128, dtype=torch.bool)
    dead[[3, 64, 100]] = True
    inputs[:, dead] = 0
    factor = factorize(hessian_of(inputs))
    assert (factor.dead_columns, factor.recovery) == (3, "")
    found = quantize_gptq(weight, factor, Int(4, 64))
    nearest = encode(weight, search_scales(weight, Int(4, 64), factor.importance), Int(4, 64))
    assert torch.equal(found.qweight[:, dead], nearest.qweight[:, dead])
    assert output_error(weight, found, inputs) < output_error(weight, nearest, inputs)


def test_a_zero_hessian_falls_back_to_rounding_and_says_so() -> None:
    weight = random_weight(16, 64)
    factor = factorize(torch.zeros(64, 64))
    assert factor.feedback is None
    assert factor.damping is None
    assert factor.recovery == "rtn: every calibration input was zero"
    assert factor.dead_columns == 64
    assert torch.equal(quantize_gptq(weight, factor, Int(4, 32)).qweight, Int(4, 32).round(weight).qweight)


def indefinite(excess: float) -> Tensor:
    """A symmetric matrix with unit diagonal whose smallest eigenvalue is `-excess`."""
    matrix = torch.eye(64)
    matrix[0, 1] = matrix[1, 0] = 1 + excess
    return matrix


@pytest.mark.parametrize(
    ("excess", "damping", "recovery"),
    [
        (0.0, 0.01, ""),
        (0.05, 0.1, "damping raised to 0.1"),
        (0.5, 1.0, "damping raised to 1"),
        (4.0, None, "eigenvalues raised to at least 0.01 of the mean diagonal"),
    ],
)
def test_the_ladder_climbs_as_far_as_it_must(excess: float, damping: float | None, recovery: str) -> None:
    factor = factorize(indefinite(excess))
    assert (factor.damping, factor.recovery) == (damping, recovery)
    assert factor.feedback is not None
    quantize_gptq(random_weight(8, 64), factor, Int(4, 32))


def test_the_last_rung_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_convergence(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", no_convergence)
    factor = factorize(indefinite(4.0))
    assert factor.feedback is None
    assert factor.recovery == "rtn: the Hessian could not be factorized"


def test_refusals() -> None:
    hessian = hessian_of(correlated_inputs(256, 64))
    broken = hessian.clone()
    broken[0, 0] = torch.inf
    with pytest.raises(NumericsError, match="Hessian"):
        factorize(broken)
    weight = random_weight(4, 64)
    weight[0, 0] = torch.nan
    with pytest.raises(NumericsError, match="weight"):
        quantize_gptq(weight, factorize(hessian), Int(4, 32))
    with pytest.raises(SchemeError, match=r" 128 .* 64 .*--ignore"):
        quantize_gptq(random_weight(4, 64), factorize(hessian), Int(4, 128))

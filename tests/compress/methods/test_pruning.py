"""Pruning: masks by their definitions, SparseGPT against a slow reference, and shares of blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from compress.checkpoint.weights import Int, NMSparsity
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import NumericsError, RecipeError
from compress.methods.gptq import quantize_gptq
from compress.methods.owl import block_patterns, block_shares, outlier_ratio
from compress.methods.pruning import RIA, Magnitude, Wanda, keep_pattern, keep_share
from compress.methods.shared.hessian import HessianOptions, factorize
from compress.methods.sparsegpt import prune_sparsegpt
from compress.recipe_file import parse_recipe
from compress.stages.prune import PruneStage

TWO_OF_FOUR, FOUR_OF_EIGHT = NMSparsity(2, 4), NMSparsity(4, 8)


def correlated_inputs(columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(columns) + 0.6 * torch.randn(columns, columns, generator=generator) / columns**0.5
    sizes = torch.exp(0.7 * torch.randn(columns, generator=generator))
    common = torch.randn(4 * columns, 1, generator=generator)
    return (torch.randn(4 * columns, columns, generator=generator) @ mixing + common) * sizes


def hessian_of(inputs: Tensor) -> Tensor:
    return 2 * inputs.T @ inputs / len(inputs)


def output_error(weight: Tensor, changed: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (changed - weight).T).square().mean())


def values_of(result: CodedWeight | Tensor) -> Tensor:
    return result.dequantize() if isinstance(result, CodedWeight) else result


def test_scores_by_their_formulas() -> None:
    weight = torch.tensor([[1.0, -4.0], [2.0, 0.0]])
    mean_square = torch.tensor([9.0, 0.25])
    assert Magnitude().score(weight, None).tolist() == [[1, 4], [2, 0]]
    assert Wanda().score(weight, mean_square).tolist() == [[3, 2], [6, 0]]
    expected = torch.tensor([[1 / 5 + 1 / 3, 4 / 5 + 1], [1 + 2 / 3, 0]]) * torch.tensor([3**0.5, 0.5**0.5])
    torch.testing.assert_close(RIA().score(weight, mean_square), expected)


@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 6),
    pattern=st.sampled_from([TWO_OF_FOUR, FOUR_OF_EIGHT]),
    seed=st.integers(0, 999),
)
def test_a_pattern_keeps_the_best_of_each_group(rows, groups, pattern, seed) -> None:
    score = torch.rand(rows, groups * pattern.m, generator=torch.Generator().manual_seed(seed))
    kept = keep_pattern(score, pattern).view(rows, groups, pattern.m)
    assert (kept.sum(-1) == pattern.n).all()
    grouped = score.view(rows, groups, pattern.m)
    lowest_kept = grouped.masked_fill(~kept, 2).amin(-1)
    assert (grouped.masked_fill(kept, -1).amax(-1) <= lowest_kept).all()


def test_shares_are_exact() -> None:
    score = torch.rand(10, 30, generator=torch.Generator().manual_seed(0))
    assert ((~keep_share(score, 0.3, per_output=True)).sum(1) == 9).all()
    whole = keep_share(score, 0.3, per_output=False)
    assert int((~whole).sum()) == 90
    assert score[~whole].max() <= score[whole].min()
    assert keep_share(score, 0.0, per_output=True).all()
    assert not keep_share(score, 1.0, per_output=True).any()


def slow_sparsegpt(weight: Tensor, hessian: Tensor, pattern: NMSparsity) -> Tensor:
    """The paper's algorithm with the inverse Hessian shrunk column by column, in float64, no blocks."""
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    result = weight.double().clone()
    columns = weight.shape[1]
    upper = torch.linalg.cholesky(inverse, upper=True)
    kept = torch.ones_like(weight, dtype=torch.bool)
    for column in range(columns):
        if column % pattern.m == 0:
            stretch = slice(column, column + pattern.m)
            score = (result[:, stretch] / upper.diagonal()[stretch]).square()
            kept[:, stretch] = keep_pattern(score, pattern)
        value = torch.where(kept[:, column], result[:, column], 0.0)
        error = (result[:, column] - value) / upper[column, column]
        result[:, column] = value
        result[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
    return result


@pytest.mark.parametrize("pattern", [TWO_OF_FOUR, FOUR_OF_EIGHT])
@pytest.mark.parametrize("columns", [32, 88, 200])
def test_sparsegpt_is_the_paper_s(pattern, columns) -> None:
    weight = torch.randn(24, columns, generator=torch.Generator().manual_seed(1))
    hessian = hessian_of(correlated_inputs(columns))
    found = prune_sparsegpt(weight, factorize(hessian, HessianOptions(activation_order=False)), pattern, 0.5)
    expected = slow_sparsegpt(weight, hessian, pattern)
    same_place = ((found != 0) == (expected != 0)).float().mean()
    assert same_place > 0.995  # near ties may fall the other way in float32
    agreeing = ((found != 0) == (expected != 0)).all(1)
    assert agreeing.any()
    torch.testing.assert_close(found[agreeing].double(), expected[agreeing], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pattern", [TWO_OF_FOUR, None])
def test_sparsegpt_beats_wanda_beats_magnitude(pattern) -> None:
    inputs = correlated_inputs(192)
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(2))
    mean_square = inputs.square().mean(0)
    errors = {}
    for method in (Magnitude(), Wanda()):
        score = method.score(weight, mean_square)
        kept = keep_pattern(score, pattern) if pattern else keep_share(score, 0.5, per_output=method.per_output)
        errors[method.name] = output_error(weight, weight * kept, inputs)
    found = prune_sparsegpt(weight, factorize(hessian_of(inputs), HessianOptions(activation_order=False)), pattern, 0.5)
    errors["sparsegpt"] = output_error(weight, found, inputs)
    assert errors["sparsegpt"] < 0.9 * errors["wanda"]
    assert errors["wanda"] < 0.9 * errors["magnitude"]
    assert float((found == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


@examples(20)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    pattern=st.sampled_from([TWO_OF_FOUR, FOUR_OF_EIGHT, None]),
    seed=st.integers(0, 999),
)
def test_zeros_are_exact_in_every_scheme(bits, symmetric, pattern, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, scheme = torch.randn(8, 64, generator=generator), Int(bits, 32, symmetric)
    hessian = hessian_of(correlated_inputs(64, seed))
    joint = values_of(
        prune_sparsegpt(weight, factorize(hessian, HessianOptions(activation_order=False)), pattern, 0.5, scheme)
    )
    score = Wanda().score(weight, hessian.diagonal())
    kept = keep_pattern(score, pattern) if pattern else keep_share(score, 0.5, per_output=True)
    after = quantize_gptq(weight, factorize(hessian), scheme, kept=kept).dequantize()
    rounded = scheme.round(weight * kept).dequantize()
    for result in (after, rounded):
        assert (result[~kept] == 0).all()
    if pattern:
        assert ((joint.view(8, -1, pattern.m) != 0).sum(-1) <= pattern.n).all()
    assert float((joint == 0).float().mean()) >= 0.5


def test_joint_rounding_beats_rounding_afterwards() -> None:
    inputs = correlated_inputs(128)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    factor, scheme = factorize(hessian_of(inputs), HessianOptions(activation_order=False)), Int(4, 32)
    joint = values_of(prune_sparsegpt(weight, factor, TWO_OF_FOUR, 0.5, scheme))
    pruned = values_of(prune_sparsegpt(weight, factor, TWO_OF_FOUR, 0.5))
    after = scheme.round(pruned, inputs.square().mean(0)).dequantize()
    assert output_error(weight, joint, inputs) < output_error(weight, after, inputs)


def test_without_a_usable_hessian_it_is_wanda() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(4))
    factor = factorize(torch.zeros(32, 32), HessianOptions(activation_order=False))
    found = values_of(prune_sparsegpt(weight, factor, TWO_OF_FOUR, 0.5))
    assert ((found.view(8, 8, 4) != 0).sum(-1) == 2).all()


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(NumericsError):
        Magnitude().score(torch.tensor([[float("nan")]]), None)


RATIOS = st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 10**6)), min_size=1, max_size=40)


@given(blocks=RATIOS, share=st.floats(0.2, 0.8), spread=st.floats(0.01, 0.15))
def test_the_mean_is_kept_and_no_block_strays(blocks, share, spread) -> None:
    ratios, weights = zip(*blocks, strict=True)
    shares = block_shares(ratios, weights, share, spread)
    mean = sum(each * count for each, count in zip(shares, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(share, abs=1e-9)
    assert all(abs(each - share) <= spread + 1e-12 for each in shares)
    if len(set(shares)) > 1:
        assert max(abs(each - share) for each in shares) == pytest.approx(spread)
        assert shares[max(range(len(ratios)), key=ratios.__getitem__)] == min(shares)


def test_blocks_that_are_alike_are_pruned_alike() -> None:
    assert block_shares([0.1 + 1e-17, 0.1, 0.1], [3, 3, 3], 0.7, 0.08) == [0.7] * 3


@given(shares=st.lists(st.floats(-0.08, 0.08), min_size=1, max_size=20))
def test_mixed_patterns_keep_as_many_as_the_pattern_asks_for(shares) -> None:
    centred = [0.5 + each - sum(shares) / len(shares) for each in shares]
    patterns = block_patterns(centred, NMSparsity(4, 8))
    assert sum(pattern.n for pattern in patterns) == 4 * len(shares)
    assert all(abs(pattern.n / 8 - (1 - share)) < 1 / 8 for pattern, share in zip(patterns, centred, strict=True))


def test_outliers_are_counted_against_the_mean_of_the_whole_block() -> None:
    large, small = torch.full((2, 5), 100.0), torch.ones(9, 10)
    assert outlier_ratio([large, small], 5) == pytest.approx(10 / 100)
    assert outlier_ratio([large], 5) == 0
    assert outlier_ratio([], 5) == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layerwise": "owls"}, "'owl'"),
        ({"layerwise": "owl", "sparsity": 0.95}, r"owl_lambda=.*0\.95 .*--owl-lambda"),
        ({"layerwise": "owl", "owl_m": 1.0}, r"owl_m=1\.0 "),
        ({"layerwise": "owl", "pattern": NMSparsity(2, 4)}, "2:4 .*1/4.*4:8"),
    ],
)
def test_layerwise_options_that_mean_nothing_are_refused(options, problem) -> None:
    with pytest.raises(RecipeError, match=problem):
        PruneStage(**options)


def test_a_recipe_says_owl_and_its_options() -> None:
    text = "stages:\n- prune: {method: wanda, sparsity: 0.7, layerwise: owl, owl_m: 7, owl_lambda: 0.05}\n"
    stage = parse_recipe(text, "owl.yaml").stages[0]
    assert stage == PruneStage("wanda", None, 0.7, "owl", 0.05, 7.0)
    assert PruneStage("magnitude", layerwise="owl").needs_calibration

"""Shares of blocks: the mean stays, no block strays, and outliers are spared."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.checkpoint.weights import NMSparsity
from compress.common.errors import RecipeError
from compress.methods.owl import block_patterns, block_shares, outlier_ratio
from compress.recipe import PruneStage
from compress.recipe_file import parse_recipe

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
        ({"layerwise": "owl", "sparsity": 0.95}, r"leaves 0.*1"),
        ({"layerwise": "owl", "outlier_factor": 1.0}, "outliers of most weights"),
        ({"layerwise": "owl", "pattern": NMSparsity(2, 4)}, "too coarse.*4:8"),
    ],
)
def test_layerwise_options_that_mean_nothing_are_refused(options, problem) -> None:
    with pytest.raises(RecipeError, match=problem):
        PruneStage(**options)


def test_a_recipe_says_owl_and_its_options() -> None:
    text = "stages:\n- prune: {method: wanda, sparsity: 0.7, layerwise: owl, owl_m: 7, owl_lambda: 0.05}\n"
    stage = parse_recipe(text, "owl.yaml").stages[0]
    assert stage == PruneStage("wanda", None, 0.7, "owl", 7.0, 0.05)
    assert PruneStage("magnitude", layerwise="owl").needs_calibration

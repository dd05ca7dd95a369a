"""Patterns of --ignore and of recipes: what they mean, and that none may mean nothing."""

import pytest

from compress.common.errors import RecipeError
from compress.targets import matches, select, without_indices

MODULES = [f"model.layers.{i}.{name}" for i in range(12) for name in ("self_attn.q_proj", "mlp.down_proj")] + [
    "lm_head"
]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.1.mlp.down_proj", 1),
        ("down_proj", 12),
        ("model.layers.1", 2),
        ("layers.1", 0),
        ("*.down_proj", 12),
        ("model.layers.[0-3].*", 8),
        ("re:.*q_proj$", 12),
        (r"re:model\.layers\.(0|11)\.", 4),
        ("re:down_proj", 0),
        ("lm_head", 1),
        ("proj", 0),
    ],
)
def test_what_a_pattern_means(pattern: str, count: int) -> None:
    assert sum(matches(pattern, module) for module in MODULES) == count


def test_a_typo_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"--ignore.*'lm_haed'.*lm_head"):
        select(["lm_head", "lm_haed"], MODULES, "--ignore")


def test_a_broken_expression_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"\('.*glob"):
        select(["re:("], MODULES, "targets")


def test_kinds() -> None:
    assert without_indices("model.layers.11.mlp.experts.3.w1") == "model.layers.*.mlp.experts.*.w1"
    assert without_indices("model.h2o.0") == "model.h2o.*"

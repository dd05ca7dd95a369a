"""From the size that a checkpoint shall have to the share of weights that low rank keeps. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compress.checkpoint.errors import RecipeError
from compress.recipe import Recipe
from compress.stages.factorize import FactorizeStage

LEAST, MOST = 0.01, 0.99
_HALVINGS = 20


def with_keep(recipe: Recipe, planned_bytes: Callable[[Recipe], int]) -> Recipe:
    """The recipe with the largest `keep` in the place of a target size; without a target size it stays as it is.

    Args:
        planned_bytes: of a recipe's checkpoint.

    Raises:
        RecipeError: two stages have a target size, or one is out of reach.
    """
    wanted = [stage for stage in recipe.stages if isinstance(stage, FactorizeStage) and stage.target_size is not None]
    if not wanted:
        return recipe
    if len(wanted) > 1:
        raise RecipeError("two stages decide the size of the checkpoint", "Give one of them `keep` instead")
    stage = wanted[0]
    target = stage.target_size or 0

    def keeping(share: float) -> Recipe:
        changed = replace(stage, keep=share, target_size=None)
        return replace(recipe, stages=tuple(changed if each is stage else each for each in recipe.stages))

    low, high = LEAST, MOST
    for share in (low, high):
        size = planned_bytes(keeping(share))
        if (size > target) == (share == low):
            raise RecipeError(
                f"low rank cannot give {target:,} bytes: keeping {share:.0%} of the weights takes about {size:,}",
                "Choose another size, or quantize the factors too" if share == low else "Choose a smaller size",
            )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if planned_bytes(keeping(middle)) <= target else (low, middle)
    return keeping(low)

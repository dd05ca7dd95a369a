"""What the quality benchmark can try: settings of equal size, the methods of each, and the orders that are promised.

A setting is written `w4g64` (4-bit weights in groups of 64), `w8a8`, `2:4` or `50%` (pruning), `2:4+w4g64` (pruned and
rounded), `rank0.8` (low rank, 80 % of the weights kept), or `recipes`, whose methods are the bundled recipe files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from compress.checkpoint.scheme import Scheme, Sparsity
from compress.common.errors import RecipeError
from compress.recipe import METHODS, FactorizeStage, PruneStage, QuantizeStage, Recipe, Stage
from compress.recipe_file import bundled_recipes, load_recipe, load_work

RECIPES = "recipes"
SETTINGS = ("w4g64", "w4g128", "w3g64", "w2g64", "w8a8", "2:4", "50%", "2:4+w4g64", "rank0.8", RECIPES)
NO_CALIBRATION = frozenset(("rtn", "hqq", "magnitude", "svd"))
JOINT, AFTERWARDS = "sparsegpt+gptq", "sparsegpt+rtn"


@dataclass(frozen=True)
class Order:
    """`better` must not be worse than `worse` at the same setting; a strict one must be better."""

    better: str
    worse: str
    strict: bool = False

    def __str__(self) -> str:
        return f"{self.better} {'<' if self.strict else '<='} {self.worse}"


def methods_of(setting: str) -> tuple[str, ...]:
    """What can be tried at a setting."""
    if setting == RECIPES:
        return tuple(name for name in bundled_recipes() if isinstance(load_work(name), Recipe))
    if setting == "w8a8":
        return ("rtn", "smoothquant")
    if setting.startswith("w"):
        return tuple(method for method in METHODS if method != "smoothquant")
    if setting.startswith("rank"):
        return ("svd", "asvd", "svd-llm")
    return (AFTERWARDS, JOINT) if "+" in setting else ("magnitude", "wanda", "ria", "sparsegpt")


def orders_of(setting: str) -> tuple[Order, ...]:
    """What the papers promise at a setting, and this toolkit holds itself to."""
    if setting == RECIPES:
        return ()
    if setting == "w8a8":
        return (Order("smoothquant", "rtn"),)
    if setting.startswith("w"):
        learned = (Order("signround", "gptq", strict=True),) if setting.startswith(("w2", "w3")) else ()
        return (Order("awq", "rtn"), Order("gptq", "rtn", strict=True), *learned)
    if "+" in setting:
        return (Order(JOINT, AFTERWARDS),)
    ladder = ("svd-llm", "asvd", "svd") if setting.startswith("rank") else ("sparsegpt", "wanda", "magnitude")
    return tuple(Order(better, worse) for better, worse in pairwise(ladder))


def stages_of(setting: str, method: str) -> tuple[Stage, ...]:
    """The stages of one trial.

    Raises:
        RecipeError: a setting or method that does not exist.
    """
    if setting == RECIPES:
        return load_recipe(method).stages
    if "+" in setting:
        pattern, _, scheme = setting.partition("+")
        pruning, _, rounding = method.partition("+")
        return (*stages_of(pattern, pruning), *stages_of(scheme, rounding))
    if setting == "w8a8":
        return (QuantizeStage(method, Scheme(8, None, activation_bits=8)),)
    try:
        return (_stage(setting, method),)
    except ValueError as error:
        raise RecipeError(f"setting {setting!r} means nothing: {error}", f"Settings: {', '.join(SETTINGS)}") from error


def _stage(setting: str, method: str) -> Stage:
    if setting.startswith("w"):
        bits, _, group_size = setting.removeprefix("w").partition("g")
        return QuantizeStage(method, Scheme(int(bits), int(group_size)))
    if setting.startswith("rank"):
        return FactorizeStage(method, float(setting.removeprefix("rank")), allocation="uniform")
    if setting.endswith("%"):
        return PruneStage(method, sparsity=float(setting.removesuffix("%")) / 100)
    kept, _, of = setting.partition(":")
    return PruneStage(method, Sparsity(int(kept), int(of)))

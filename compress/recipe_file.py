"""Recipes as YAML files. Every refusal names the file, the line and the key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.parts import Part
from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.recipe import CalibrationOptions, Recipe
from compress.recipe_nodes import NodeReader, kind_of
from compress.search.goal import Goal
from compress.search.menu import parse_menu
from compress.search.request import SearchRequest
from compress.stages.factorize import FactorizeStage
from compress.stages.kv_cache import KVCacheStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import (
    QuantizeStage,
    activation_bits_from,
    default_method,
    default_scheme,
    group_size_from,
)
from compress.stages.rotate import RotateStage
from compress.stages.table import Stage
from compress.stages.tuning import Tuning
from compress.stages.words import nearest

if TYPE_CHECKING:
    import yaml


_TUNING = {"steps": int, "lr": float, "batch": int}


def bundled_recipes() -> dict[str, Path]:
    """Recipes that ship with the package, by name."""
    folder = Path(str(files("recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str) -> Recipe:
    """Reads a recipe with stages, by file or bundled name. Raises RecipeError as `load_work`, and for a search."""
    return parse_recipe(*_read(name))


def load_work(name: str) -> Recipe | SearchRequest:
    """Reads a recipe file, or a bundled recipe by name: stages, or a search for them.

    Raises:
        RecipeError: no such recipe, not YAML, or a key or value that means nothing; says file, line and key.
    """
    return parse_work(*_read(name))


def _read(name: str) -> tuple[str, str]:
    """The text of a recipe, and the file that errors name."""
    path = bundled_recipes().get(name, Path(name))
    if not path.is_file():
        raise RecipeError(f"recipe {name} does not exist", nearest(name, tuple(bundled_recipes()), "Bundled recipes"))
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise RecipeError(problem, "Name a YAML file") from error


def parse_recipe(text: str, origin: str) -> Recipe:
    """A recipe with stages from YAML text; `origin` is the file name that errors show.

    Raises:
        RecipeError: as `load_work`, and for a search.
    """
    work = parse_work(text, origin)
    if isinstance(work, SearchRequest):
        raise RecipeError(f"{origin} searches for its stages", "Give it to compress run, or name a recipe with stages")
    return work


def parse_work(text: str, origin: str) -> Recipe | SearchRequest:
    """Stages, or a search for them, from YAML text."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin} is not YAML: {' '.join(str(error).split())}", "Correct the file") from error
    if root is None:
        raise RecipeError(f"{origin} is empty", "A recipe needs at least `stages:` or `search:`")
    return _RecipeReader(origin).recipe(root)


class _RecipeReader(NodeReader):
    """The words of a recipe."""

    def recipe(self, node: yaml.Node) -> Recipe | SearchRequest:
        values = self.mapping(node, ("name", "seed", "calibration", "stages", "search"), "recipe")
        options: dict[str, Any] = {"name": Path(self.origin).stem}
        if "name" in values:
            options["name"] = self.scalar(values["name"], str, "name")
        if "seed" in values:
            options["seed"] = self.scalar(values["seed"], int, "seed")
        if "calibration" in values:
            options["calibration"] = self._calibration(values["calibration"])
        if "search" in values and "stages" in values:
            raise self.refusal(values["search"], "a recipe has stages or searches for them", "Remove one of them")
        if "search" in values:
            return self._search(values["search"], options)
        stages = tuple(self._stage(item) for item in self.items(values.get("stages"), "stages"))
        return self.build(node, Recipe, stages=stages, **options)

    def _search(self, body: yaml.Node, options: dict[str, Any]) -> SearchRequest:
        keys = ("target_bpw", "target_size", "max_kl", "menu", "method", "measured", "tries", "ignore", "ends")
        values = self.mapping(body, keys, "search")
        target: dict[str, Any] = {}
        for key, name in (("target_bpw", "bits_per_weight"), ("max_kl", "kl")):
            if key in values:
                target[name] = self.number(values[key], key)
        if "target_size" in values:
            target["size"] = self.size(values["target_size"], "target_size")
        if "menu" in values:
            # As for patterns, the text counts.
            words = [str(item.value) for item in self.items(values["menu"], "menu")]
            options["menu"] = self.meant(values["menu"], lambda: parse_menu(",".join(words)))
        options |= self.options(values, {"method": str, "measured": int, "tries": int, "ends": bool})
        return self.build(body, SearchRequest, goal=self.build(body, Goal, **target), **options)

    def _calibration(self, node: yaml.Node) -> CalibrationOptions:
        values = self.mapping(node, ("source", "samples", "length"), "calibration")
        options = self.options(values, {"samples": int, "length": int})
        if "source" in values:
            options["source"] = self._source(values["source"])
        return self.build(node, CalibrationOptions, **options)

    def _source(self, node: yaml.Node) -> str | tuple[Part, ...]:
        """One text as a name, or several as a list of `{source, weight}`."""
        if kind_of(node) == "scalar":
            return self.scalar(node, str, "source")
        return tuple(self._part(item) for item in self.items(node, "source"))

    def _part(self, node: yaml.Node) -> Part:
        values = self.mapping(node, ("source", "weight"), "part of the calibration")
        if "source" not in values:
            raise self.refusal(node, "a part of the calibration has no source", "Write {source: bundled, weight: 0.5}")
        options = {"weight": self.number(values["weight"], "weight")} if "weight" in values else {}
        return self.build(node, Part, source=self.scalar(values["source"], str, "source"), **options)

    def _stage(self, node: yaml.Node) -> Stage:
        kinds: dict[str, Callable[[yaml.Node], Stage]] = {
            "rotate": self._rotate,
            "quantize": self._quantize,
            "prune": self._prune,
            "factorize": self._factorize,
            "kv_cache": self._kv_cache,
        }
        stage = self.mapping(node, tuple(kinds), "stage")
        if len(stage) != 1:
            raise self.refusal(node, "a stage names one kind of work", "Write `- quantize: {method: awq}`")
        ((kind, body),) = stage.items()
        return kinds[kind](body)

    def _rotate(self, body: yaml.Node) -> RotateStage:
        values = self.mapping(body, ("heads",), "rotate")
        options = {"heads": self.scalar(values["heads"], bool, "heads")} if "heads" in values else {}
        return self.build(body, RotateStage, **options)

    def _quantize(self, body: yaml.Node) -> QuantizeStage:
        scheme_keys = ("bits", "fp8", "group_size", "symmetric", "activation_bits", "outlier_columns")
        values = self.mapping(body, ("method", *scheme_keys, "alpha", *_TUNING, "targets", "ignore"), "quantize")
        fp8 = "fp8" in values and self.scalar(values["fp8"], bool, "fp8")
        options = {"method": default_method(fp8)}
        options |= self.options(values, {"method": str, "alpha": float, "outlier_columns": float})
        if tuning := self.scalars(values, _TUNING):
            options["tuning"] = self.build(body, Tuning, **tuning)
        scheme = self._scheme(body, values, default_scheme(options["method"], fp8))
        return self.build(body, QuantizeStage, scheme=scheme, **options)

    def _prune(self, body: yaml.Node) -> PruneStage:
        keys = ("method", "pattern", "sparsity", "layerwise", "outlier_factor", "spread", "targets", "ignore")
        values = self.mapping(body, keys, "prune")
        types = {"method": str, "sparsity": float, "layerwise": str, "outlier_factor": float, "spread": float}
        options = self.options(values, types)
        if "pattern" in values:
            options["pattern"] = self._pattern(values["pattern"])
        return self.build(body, PruneStage, **options)

    def _factorize(self, body: yaml.Node) -> FactorizeStage:
        keys = ("method", "keep", "allocation", "target_size", "targets", "ignore")
        values = self.mapping(body, keys, "factorize")
        options = self.options(values, {"method": str, "keep": float, "allocation": str})
        if "target_size" in values:
            if "keep" in values:
                raise self.refusal(values["keep"], "keep and target_size both decide the ranks", "Give one of them")
            options["target_size"] = self.size(values["target_size"], "target_size")
        return self.build(body, FactorizeStage, **options)

    def _kv_cache(self, body: yaml.Node) -> KVCacheStage:
        types = {"format": str, "rotate": bool, "sinks": int, "recent": int, "data": str, "tokens": int, "length": int}
        types |= {"max_kl": float}
        values = self.mapping(body, tuple(types), "kv_cache")
        return self.build(body, KVCacheStage, **self.scalars(values, types))

    def _pattern(self, node: yaml.Node) -> Sparsity:
        """`2:4`. YAML 1.1 reads that as a number to the base of 60, so the text counts, quoted or not."""
        return self.meant(node, lambda: Sparsity.parse(str(node.value)))

    def _scheme(self, node: yaml.Node, values: dict[str, yaml.Node], default: Scheme) -> Scheme:
        options: dict[str, Any] = asdict(default)
        if "bits" in values:
            options["bits"] = self.scalar(values["bits"], int, "bits")
        if "activation_bits" in values:
            options["activation_bits"] = activation_bits_from(
                self.scalar(values["activation_bits"], int, "activation_bits")
            )
        if "group_size" in values:
            options["group_size"] = group_size_from(self.scalar(values["group_size"], int, "group_size"))
        if "symmetric" in values:
            options["symmetric"] = self.scalar(values["symmetric"], bool, "symmetric")
        return self.build(node, Scheme, **options)

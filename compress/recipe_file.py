"""Recipes as YAML files. Every refusal names the file, the line and the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.parts import Part
from compress.checkpoint.errors import DataError, RecipeError, SchemeError
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.recipe import CalibrationOptions, Recipe
from compress.search.goal import Goal, parse_size
from compress.search.menu import parse_menu
from compress.search.request import SearchRequest
from compress.stages.factorize import FactorizeStage
from compress.stages.kv_cache import KVCacheStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage, default_scheme, group_size_from
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


def load_recipe(spec: str) -> Recipe:
    """Reads a recipe with stages, by file or bundled name. Raises RecipeError as `load_work`, and for a search."""
    work = load_work(spec)
    if isinstance(work, SearchRequest):
        raise RecipeError(f"recipe {spec} searches for its stages", f"Use compress run {spec}")
    return work


def load_work(spec: str) -> Recipe | SearchRequest:
    """Reads a recipe file, or a bundled recipe by name: stages, or a search for them.

    Raises:
        RecipeError: no such recipe, not YAML, or a key or value that means nothing; says file, line and key.
    """
    path = bundled_recipes().get(spec, Path(spec))
    if not path.is_file():
        raise RecipeError(f"recipe {spec} does not exist", nearest(spec, tuple(bundled_recipes()), "Bundled recipes"))
    return parse_work(path.read_text(encoding="utf-8"), str(path))


def parse_recipe(text: str, origin: str) -> Recipe:
    """A recipe with stages from YAML text; `origin` is the file name that errors show."""
    work = parse_work(text, origin)
    if isinstance(work, SearchRequest):
        raise RecipeError(f"{origin} searches for its stages", "Give it `stages:` instead of `search:`")
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
    return _Reader(origin).recipe(root)


class _Reader:
    """Turns YAML nodes into a Recipe and knows the line of everything it refuses."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def recipe(self, node: yaml.Node) -> Recipe | SearchRequest:
        values = self._mapping(node, ("name", "seed", "calibration", "stages", "search"), "recipe")
        options: dict[str, Any] = {"name": Path(self.origin).stem}
        if "name" in values:
            options["name"] = self._scalar(values["name"], str, "name")
        if "seed" in values:
            options["seed"] = self._scalar(values["seed"], int, "seed")
        if "calibration" in values:
            options["calibration"] = self._calibration(values["calibration"])
        if "search" in values and "stages" in values:
            raise self._refusal(values["search"], "a recipe has stages or searches for them", "Remove one of them")
        if "search" in values:
            return self._search(values["search"], options)
        stages = tuple(self._stage(item) for item in self._items(values.get("stages"), "stages"))
        return self._build(node, Recipe, stages=stages, **options)

    def _search(self, body: yaml.Node, options: dict[str, Any]) -> SearchRequest:
        keys = ("target_bpw", "target_size", "max_kl", "menu", "method", "measured", "tries", "ignore", "ends")
        values = self._mapping(body, keys, "search")
        target: dict[str, Any] = {}
        for key, name in (("target_bpw", "bits_per_weight"), ("max_kl", "kl")):
            if key in values:
                target[name] = self._number(values[key], key)
        if "target_size" in values:
            target["size"] = self._size(values["target_size"], "target_size")
        if "menu" in values:
            # As for patterns, the text counts.
            words = [str(item.value) for item in self._items(values["menu"], "menu")]
            options["menu"] = self._meant(values["menu"], lambda: parse_menu(",".join(words)))
        options |= self._options(values, {"method": str, "measured": int, "tries": int, "ends": bool})
        return self._build(body, SearchRequest, goal=self._build(body, Goal, **target), **options)

    def _calibration(self, node: yaml.Node) -> CalibrationOptions:
        values = self._mapping(node, ("source", "samples", "length"), "calibration")
        options = self._options(values, {"samples": int, "length": int})
        if "source" in values:
            options["source"] = self._source(values["source"])
        return self._build(node, CalibrationOptions, **options)

    def _source(self, node: yaml.Node) -> str | tuple[Part, ...]:
        """One text as a name, or several as a list of `{source, weight}`."""
        if node.id == "scalar":
            return self._scalar(node, str, "source")
        return tuple(self._part(item) for item in self._items(node, "source"))

    def _part(self, node: yaml.Node) -> Part:
        values = self._mapping(node, ("source", "weight"), "part of the calibration")
        if "source" not in values:
            raise self._refusal(node, "a part of the calibration has no source", "Write {source: bundled, weight: 0.5}")
        options = {"weight": self._number(values["weight"], "weight")} if "weight" in values else {}
        return self._build(node, Part, source=self._scalar(values["source"], str, "source"), **options)

    def _number(self, node: yaml.Node, what: str) -> float:
        """A number, whole or not. YAML 1.1 takes `1e-3` for a word, so the text counts unless it is quoted."""
        try:
            number = float(node.value) if node.id == "scalar" and node.style is None else None
        except ValueError:
            number = None
        number = self._scalar(node, float, what) if number is None else number
        if not math.isfinite(number):
            raise self._refusal(node, f"{what}: {node.value!r} is not finite", "Correct the value")
        return number

    def _stage(self, node: yaml.Node) -> Stage:
        kinds = {
            "rotate": self._rotate,
            "quantize": self._quantize,
            "prune": self._prune,
            "factorize": self._factorize,
            "kv_cache": self._kv_cache,
        }
        stage = self._mapping(node, tuple(kinds), "stage")
        if len(stage) != 1:
            raise self._refusal(node, "a stage names one kind of work", "Write `- quantize: {method: awq}`")
        ((kind, body),) = stage.items()
        return kinds[kind](body)

    def _rotate(self, body: yaml.Node) -> RotateStage:
        values = self._mapping(body, ("heads",), "rotate")
        options = {"heads": self._scalar(values["heads"], bool, "heads")} if "heads" in values else {}
        return self._build(body, RotateStage, **options)

    def _quantize(self, body: yaml.Node) -> QuantizeStage:
        scheme_keys = ("bits", "group_size", "symmetric", "activation_bits", "outlier_columns")
        values = self._mapping(body, ("method", *scheme_keys, "alpha", *_TUNING, "targets", "ignore"), "quantize")
        options = self._options(values, {"method": str, "alpha": float, "outlier_columns": float})
        if tuning := self._scalars(values, _TUNING):
            options["tuning"] = self._build(body, Tuning, **tuning)
        scheme = self._scheme(body, values, default_scheme(options.get("method", "")))
        return self._build(body, QuantizeStage, scheme=scheme, **options)

    def _prune(self, body: yaml.Node) -> PruneStage:
        keys = ("method", "pattern", "sparsity", "layerwise", "outlier_factor", "spread", "targets", "ignore")
        values = self._mapping(body, keys, "prune")
        types = {"method": str, "sparsity": float, "layerwise": str, "outlier_factor": float, "spread": float}
        options = self._options(values, types)
        if "pattern" in values:
            options["pattern"] = self._pattern(values["pattern"])
        return self._build(body, PruneStage, **options)

    def _factorize(self, body: yaml.Node) -> FactorizeStage:
        keys = ("method", "keep", "allocation", "target_size", "targets", "ignore")
        values = self._mapping(body, keys, "factorize")
        options = self._options(values, {"method": str, "keep": float, "allocation": str})
        if "target_size" in values:
            options["target_size"] = self._size(values["target_size"], "target_size")
        return self._build(body, FactorizeStage, **options)

    def _kv_cache(self, body: yaml.Node) -> KVCacheStage:
        types = {"format": str, "rotate": bool, "sinks": int, "recent": int, "data": str, "tokens": int, "length": int}
        types |= {"max_kl": float}
        values = self._mapping(body, tuple(types), "kv_cache")
        return self._build(body, KVCacheStage, **self._scalars(values, types))

    def _pattern(self, node: yaml.Node) -> Sparsity:
        """`2:4`. YAML 1.1 reads that as a number to the base of 60, so the text counts, quoted or not."""
        return self._meant(node, lambda: Sparsity.parse(str(node.value)))

    def _options(self, values: dict[str, yaml.Node], types: dict[str, type]) -> dict[str, Any]:
        """Scalars of these types, and the lists of patterns that every stage has."""
        options = self._scalars(values, types)
        for key in {"targets", "ignore"} & values.keys():
            options[key] = tuple(self._scalar(item, str, key) for item in self._items(values[key], key))
        return options

    def _scalars(self, values: dict[str, yaml.Node], types: dict[str, type]) -> dict[str, Any]:
        given = {key: types[key] for key in types if key in values}
        return {
            key: self._number(values[key], key) if kind is float else self._scalar(values[key], kind, key)
            for key, kind in given.items()
        }

    def _size(self, node: yaml.Node, what: str) -> int:
        """Bytes, as `800MB` or a plain number."""
        if node.id != "scalar":
            raise self._refusal(node, f"{what} is a {node.id} and no size", "Write 800MB")
        return self._meant(node, lambda: parse_size(str(node.value)))

    def _scheme(self, node: yaml.Node, values: dict[str, yaml.Node], default: Scheme) -> Scheme:
        options: dict[str, Any] = asdict(default)
        for key in {"bits", "activation_bits"} & values.keys():
            options[key] = self._scalar(values[key], int, key)
        if "group_size" in values:
            options["group_size"] = group_size_from(self._scalar(values["group_size"], int, "group_size"))
        if "symmetric" in values:
            options["symmetric"] = self._scalar(values["symmetric"], bool, "symmetric")
        return self._build(node, Scheme, **options)

    def _mapping(self, node: yaml.Node, keys: tuple[str, ...], what: str) -> dict[str, yaml.Node]:
        if node.id != "mapping":
            raise self._refusal(node, f"{what} must be a mapping", f"Keys: {', '.join(keys)}")
        values: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            if key not in keys:
                raise self._refusal(key_node, f"unknown key {key!r} in {what}", nearest(key, keys, "Keys"))
            if key in values:
                raise self._refusal(key_node, f"key {key!r} stands twice in {what}", "Keep one of them")
            values[key] = value
        return values

    def _items(self, node: yaml.Node | None, what: str) -> list[yaml.Node]:
        if node is None:
            return []
        if node.id != "sequence":
            raise self._refusal(node, f"{what} must be a list", f"Write `{what}: [...]`")
        return list(node.value)

    def _scalar(self, node: yaml.Node, expected: type, what: str) -> Any:
        import yaml

        value = yaml.SafeLoader("").construct_object(node, deep=True) if node.id == "scalar" else None
        # bool is an int to Python but not to a reader of the recipe.
        if type(value) is not expected:
            shown = node.value if node.id == "scalar" else f"a {node.id}"
            raise self._refusal(node, f"{what}: {shown!r} is not of type {expected.__name__}", "Correct the value")
        return value

    def _build(self, node: yaml.Node, kind: type, **options: Any) -> Any:
        return self._meant(node, lambda: kind(**options))

    def _meant(self, node: yaml.Node, make: Callable[[], Any]) -> Any:
        """What a node means; a refusal says where it stands."""
        try:
            return make()
        except (RecipeError, SchemeError, DataError) as error:
            raise self._refusal(node, error.problem, error.remedy) from error

    def _refusal(self, node: yaml.Node, problem: str, remedy: str) -> RecipeError:
        return RecipeError(f"{self.origin}:{node.start_mark.line + 1}: {problem}", remedy)

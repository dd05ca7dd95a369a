"""Recipes as YAML files. Every refusal names the file, the line and the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from calibration.parts import Part
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.common.cli import nearest
from compress.common.errors import DataError, RecipeError, SchemeError
from compress.methods.base import make_options, quantization
from compress.recipe import (
    CalibrationOptions,
    FactorizeStage,
    KVCacheStage,
    PruneStage,
    QuantizeStage,
    Recipe,
    RotateStage,
    Stage,
    activation_bits_from,
    default_method,
    default_scheme,
    group_size_from,
)
from compress.search.space import Goal, SearchRequest, parse_menu, parse_size

if TYPE_CHECKING:
    import yaml


def kind_of(node: yaml.Node) -> str:
    """`scalar`, `sequence` or `mapping`."""
    return cast("yaml.ScalarNode", node).id  # every kind has it, whatever the type of all says


class NodeReader:
    """Reads nodes of one file and knows the line of everything it refuses.

    Attributes:
        origin: the file name that errors show.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def mapping(self, node: yaml.Node, keys: tuple[str, ...], what: str) -> dict[str, yaml.Node]:
        """Values of a mapping that has only these `keys`, each once."""
        if kind_of(node) != "mapping":
            raise self.refusal(node, f"{what} must be a mapping", f"Keys: {', '.join(keys)}")
        values: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            if key not in keys:
                raise self.refusal(key_node, f"unknown key {key!r} in {what}", nearest(key, keys, "Keys"))
            if key in values:
                raise self.refusal(key_node, f"key {key!r} stands twice in {what}", "Keep one of them")
            values[key] = value
        return values

    def items(self, node: yaml.Node | None, what: str) -> list[yaml.Node]:
        """Of a list; none of one that is not there."""
        if node is None:
            return []
        if kind_of(node) != "sequence":
            raise self.refusal(node, f"{what} must be a list", f"Write `{what}: [...]`")
        return list(node.value)

    def options(self, values: dict[str, yaml.Node], types: dict[str, type]) -> dict[str, Any]:
        """Scalars of these types, and the lists of patterns that every stage has."""
        options = self.scalars(values, types)
        for key in {"targets", "ignore"} & values.keys():
            options[key] = tuple(self.scalar(item, str, key) for item in self.items(values[key], key))
        return options

    def scalars(self, values: dict[str, yaml.Node], types: dict[str, type]) -> dict[str, Any]:
        """Those that are given."""
        given = {key: types[key] for key in types if key in values}
        return {
            key: self.number(values[key], key) if kind is float else self.scalar(values[key], kind, key)
            for key, kind in given.items()
        }

    def scalar(self, node: yaml.Node, expected: type, what: str) -> Any:
        """A scalar of just the `expected` type."""
        import yaml

        value = yaml.SafeLoader("").construct_object(node, deep=True) if kind_of(node) == "scalar" else None
        # bool is an int to Python but not to a reader of the recipe.
        if type(value) is not expected:
            shown = node.value if kind_of(node) == "scalar" else f"a {kind_of(node)}"
            raise self.refusal(node, f"{what}: {shown!r} is not of type {expected.__name__}", "Correct the value")
        return value

    def number(self, node: yaml.Node, what: str) -> float:
        """A number, whole or not. YAML 1.1 takes `1e-3` for a word, so the text counts unless it is quoted."""
        try:
            plain = kind_of(node) == "scalar" and cast("yaml.ScalarNode", node).style is None
            number = float(node.value) if plain else None
        except ValueError:
            number = None
        number = self.scalar(node, float, what) if number is None else number
        if not math.isfinite(number):
            raise self.refusal(node, f"{what}: {node.value!r} is not finite", "Correct the value")
        return number

    def size(self, node: yaml.Node, what: str) -> int:
        """Bytes, as `800MB` or a plain number."""
        if kind_of(node) != "scalar":
            raise self.refusal(node, f"{what} is a {kind_of(node)} and no size", "Write 800MB")
        return self.meant(node, lambda: parse_size(str(node.value)))

    def build(self, node: yaml.Node, kind: type, **options: Any) -> Any:
        """An object; what its class refuses is refused with the line."""
        return self.meant(node, lambda: kind(**options))

    def meant(self, node: yaml.Node, make: Callable[[], Any]) -> Any:
        """What a node means; a refusal says where it stands."""
        try:
            return make()
        except (RecipeError, SchemeError, DataError) as error:
            raise self.refusal(node, error.problem, error.remedy) from error

    def refusal(self, node: yaml.Node, problem: str, remedy: str) -> RecipeError:
        """With file and line."""
        return RecipeError(f"{self.origin}:{node.start_mark.line + 1}: {problem}", remedy)


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
        options |= self.options(values, {"method": str, "outlier_columns": float})
        given = self.scalars(values, {"alpha": float, **_TUNING})
        options["options"] = self.meant(body, lambda: make_options(quantization(options["method"]), given))
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

"""Recipes as YAML files, checked by one strict schema per stage. Every refusal names the file, the line and the key."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from calibration.parts import Part
from compress.common.cli import nearest
from compress.common.errors import DataError, RecipeError, SchemeError
from compress.common.files import read_text
from compress.recipe import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationOptions, Recipe, Stage, parse_size
from compress.search.space import (
    DEFAULT_CANDIDATES,
    DEFAULT_MEASURED,
    DEFAULT_TRIES,
    Goal,
    SearchRequest,
    parse_candidates,
)
from compress.stage_keys import PATTERN_STAGES, build_stage, stage_keys

if TYPE_CHECKING:
    import pydantic
    import yaml

Built = TypeVar("Built")
Path_ = tuple[str | int, ...]
MAX_VALUES = 100_000
"""Far above any recipe; a few aliases of aliases would grow without bound."""


@dataclass(frozen=True)
class RecipeKeys:
    """Keys of a recipe."""

    name: str = ""
    seed: int = 0
    calibration: dict[str, Any] = field(default_factory=dict)
    stages: list[Any] | None = None
    search: dict[str, Any] | None = None


@dataclass(frozen=True)
class CalibrationKeys:
    """Keys of `calibration`."""

    source: str | list[Any] = "bundled"
    num_calibration_samples: int = DEFAULT_SAMPLES
    max_seq_length: int = DEFAULT_LENGTH


@dataclass(frozen=True)
class PartKeys:
    """Keys of a part of the calibration."""

    source: str
    weight: float = 1.0


@dataclass(frozen=True)
class SearchKeys:
    """Keys of `search`; see `SearchRequest`."""

    target_bpw: float | None = None
    target_size: str | int | None = None
    max_kl: float | None = None
    candidates: list[str | int] = field(default_factory=lambda: list[str | int](DEFAULT_CANDIDATES.split(",")))
    method: str = "gptq"
    measured: int = DEFAULT_MEASURED
    tries: int = DEFAULT_TRIES
    ignore: list[str] = field(default_factory=list)
    include_embeddings: bool = False


@dataclass(frozen=True)
class PatternKeys:
    """Keys of stages that change layers."""

    targets: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)


def bundled_recipes() -> dict[str, Path]:
    """Return the recipes that ship with the package, by name."""
    folder = Path(str(files("recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str) -> Recipe:
    """Read a recipe with stages, by file or bundled name. Raises RecipeError as `load_work`, and for a search."""
    return parse_recipe(*_read(name))


def load_work(name: str) -> Recipe | SearchRequest:
    """Read a recipe file, or a bundled recipe by name: stages, or a search for them.

    Raises:
        RecipeError: no such recipe, not YAML, or a key or value that is not allowed; with file, line and key.
    """
    return parse_work(*_read(name))


def _read(name: str) -> tuple[str, str]:
    """Return the text of a recipe, and the file that errors name."""
    path = bundled_recipes().get(name, Path(name))
    if not path.exists():
        raise RecipeError(f"recipe {name} does not exist", nearest(name, tuple(bundled_recipes()), "Bundled recipes"))
    return read_text(path, RecipeError), str(path)


def parse_recipe(text: str, origin: str) -> Recipe:
    """Parse a recipe with stages; `origin` is the file name that errors show.

    Raises:
        RecipeError: as `load_work`, and for a search.
    """
    work = parse_work(text, origin)
    if isinstance(work, SearchRequest):
        raise RecipeError(f"{origin} searches for its stages", "Give it to compress run, or name a recipe with stages")
    return work


def parse_work(text: str, origin: str) -> Recipe | SearchRequest:
    """Parse stages, or a search for them, from YAML text. Raises RecipeError."""
    import yaml

    try:
        root = yaml.compose(text, Loader=_loader())
        if root is None:
            raise RecipeError(f"{origin} is empty", "A recipe needs at least `stages:` or `search:`")
        document = Document(origin)
        document.data = document.plain(root, ())
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin} is not YAML: {' '.join(str(error).split())}", "Correct the file") from error
    except RecursionError as error:
        raise RecipeError(f"{origin} is nested too deeply, or an alias holds itself", "Correct the file") from error
    return document.work()


@cache
def _loader() -> type[yaml.SafeLoader]:
    """YAML 1.2 scalars: `1e-3` is a number, and `2:4` is a word."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    replaced = (":int", ":float", ":timestamp")
    Loader.yaml_implicit_resolvers = {
        first: [each for each in resolvers if not each[0].endswith(replaced)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
    number = r"^[-+]?([0-9]+\.[0-9]*([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+([eE][-+]?[0-9]+)?"
    number += r"|\.?(inf|Inf|INF|nan|NaN|NAN))$"
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(number), list("-+0123456789.iInN"))
    return Loader


@dataclass
class Document:
    """One recipe file as plain data, with the line of everything in it.

    Attributes:
        origin: the file name that errors show.
        data: mappings, lists and scalars.
        lines: line of each value by its path.
    """

    origin: str
    data: Any = None
    lines: dict[Path_, int] = field(default_factory=dict)

    def plain(self, node: yaml.Node, path: Path_) -> Any:
        """Return a node as plain data, aliases as copies of what they name.

        Raises:
            RecipeError: a key that is given twice, a bad scalar, or more than `MAX_VALUES` values.
        """
        self.lines.setdefault(path, node.start_mark.line + 1)
        if len(self.lines) > MAX_VALUES:
            problem = f"{self.origin} has more than {MAX_VALUES:,} values, aliases written out"
            raise RecipeError(problem, "Write fewer stages, with patterns for targets")
        if node.id == "mapping":  # type: ignore[attr-defined]  # every kind of node has it
            return dict(self._items(node, path))
        if node.id == "sequence":  # type: ignore[attr-defined]
            return [self.plain(item, (*path, index)) for index, item in enumerate(node.value)]
        try:
            return _scalar(node)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]  # type: ignore[attr-defined]
            raise self.refusal(path, f"{reprlib.repr(node.value)} is no {kind}", "Correct the value") from error

    def _items(self, node: yaml.Node, path: Path_) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for key_node, value in node.value:
            key = str(key_node.value)
            here = (*path, key)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise RecipeError(f"{self.origin}:{line}: key {key!r} is given twice", "Keep one of them")
            seen.add(key)
            self.lines[here] = key_node.start_mark.line + 1
            yield key, self.plain(value, here)

    def refusal(self, path: Path_, problem: str, remedy: str) -> RecipeError:
        """Return an error with file and line."""
        return RecipeError(f"{self.origin}:{self.lines.get(path, self.lines[()])}: {problem}", remedy)

    def at(self, path: Path_, make: Callable[[], Built]) -> Built:
        """Call `make`, and add file and line to its refusals."""
        try:
            return make()
        except (RecipeError, SchemeError, DataError) as error:
            raise self.refusal(path, error.problem, error.remedy) from error

    def keys(self, kind: type[Built], data: Any, path: Path_, what: str) -> Built:
        """Check a mapping against the fields of a data class, and build it.

        Raises:
            RecipeError: no mapping, an unknown key, a value of another type, or one that the class refuses.
        """
        known = tuple(each.name for each in fields(kind))  # type: ignore[arg-type]
        if not isinstance(data, dict):
            raise self.refusal(path, f"{what} must be a mapping", f"Keys: {', '.join(known)}")
        values = self._validated(kind, data, path, what, known)
        return self.at(path, lambda: kind(**values))

    def _validated(
        self, kind: type[Any], data: Mapping[str, Any], path: Path_, what: str, known: tuple[str, ...]
    ) -> dict[str, Any]:
        from pydantic import ValidationError

        try:
            return _schema(kind).model_validate(data).model_dump(exclude_unset=True)  # type: ignore[arg-type]  # types are hashable
        except ValidationError as error:
            # An unknown key explains a missing one.
            found = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
            key = str(found["loc"][0])
            if found["type"] == "extra_forbidden":
                remedy = nearest(key, known, "Keys")
                raise self.refusal((*path, key), f"unknown key {key!r} in {what}", remedy) from error
            if found["type"] == "missing":
                raise self.refusal(path, f"{what} has no {key}", f"Add {key}") from error
            problem = f"{key}: {data[key]!r} does not fit: {found['msg']}"
            raise self.refusal((*path, key), problem, "Correct the value") from error

    def work(self) -> Recipe | SearchRequest:
        """Build the recipe or the search. Raises RecipeError."""
        keys = self.keys(RecipeKeys, self.data, (), "recipe")
        options: dict[str, Any] = {"name": keys.name or Path(self.origin).stem, "seed": keys.seed}
        if "calibration" in self.data:
            options["calibration"] = self._calibration(keys.calibration)
        if keys.search is not None and keys.stages is not None:
            raise self.refusal(("search",), "a recipe has stages or searches for them", "Remove one of them")
        if keys.search is not None:
            return self._search(keys.search, options)
        stages = tuple(self._stage(item, ("stages", index)) for index, item in enumerate(keys.stages or []))
        return self.at((), lambda: Recipe(stages, **options))

    def _search(self, data: Any, options: dict[str, Any]) -> SearchRequest:
        path = ("search",)
        keys = self.keys(SearchKeys, data, path, "search")
        size = None if keys.target_size is None else self.at(path, lambda: parse_size(str(keys.target_size)))
        goal = self.at(path, lambda: Goal(keys.target_bpw, size, keys.max_kl))
        menu = self.at(path, lambda: parse_candidates(",".join(map(str, keys.candidates))))
        options |= {"method": keys.method, "measured": keys.measured, "tries": keys.tries}
        options |= {"ignore": tuple(keys.ignore), "ends": keys.include_embeddings}
        return self.at(path, lambda: SearchRequest(goal, menu, **options))

    def _calibration(self, data: Any) -> CalibrationOptions:
        path = ("calibration",)
        keys = self.keys(CalibrationKeys, data, path, "calibration")
        source = keys.source if isinstance(keys.source, str) else self._parts(keys.source)
        size = keys.num_calibration_samples, keys.max_seq_length
        return self.at(path, lambda: CalibrationOptions(source, *size))

    def _parts(self, data: list[Any]) -> tuple[Part, ...]:
        """Return a mixture of texts from a list of `{source, weight}`."""
        parts = []
        for index, item in enumerate(data):
            path = ("calibration", "source", index)
            keys = self.keys(PartKeys, item, path, "part of the calibration")
            parts.append(self.at(path, lambda keys=keys: Part(keys.source, keys.weight)))  # type: ignore[misc]
        return tuple(parts)

    def _stage(self, data: Any, path: Path_) -> Stage:
        kinds = stage_keys()
        if not isinstance(data, dict) or len(data) != 1:
            raise self.refusal(path, "a stage names one kind of work", "Write `- quantize: {method: awq}`")
        ((kind, body),) = data.items()
        if kind not in kinds:
            raise self.refusal((*path, kind), f"unknown key {kind!r} in stage", nearest(kind, tuple(kinds), "Keys"))
        path = (*path, kind)
        if not isinstance(body, dict):
            raise self.refusal(path, f"{kind} must be a mapping", f"Write `- {kind}: {{}}`")
        if isinstance(body.get("target_size"), int):
            body = body | {"target_size": str(body["target_size"])}
        names = {each.name for each in fields(PatternKeys)} if kind in PATTERN_STAGES else set()
        patterns = self.keys(PatternKeys, {key: body[key] for key in body if key in names}, path, kind)
        keys = self.keys(kinds[kind], {key: body[key] for key in body if key not in names}, path, kind)
        return self.at(path, lambda: build_stage(kind, keys, tuple(patterns.targets), tuple(patterns.ignore)))


def _scalar(node: yaml.Node) -> Any:
    return _loader()("").construct_object(node, deep=True)  # type: ignore[no-untyped-call]


@cache
def _schema(kind: type[Any]) -> type[pydantic.BaseModel]:
    """Return a strict schema with the fields of a data class."""
    from pydantic import ConfigDict, Field, create_model

    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    hints = get_type_hints(kind)
    wanted: dict[str, Any] = {}
    for each in fields(kind):
        default = Field(default_factory=each.default_factory) if each.default_factory is not MISSING else each.default
        wanted[each.name] = (hints[each.name], ... if default is MISSING else default)
    return create_model(kind.__name__, __config__=strict, **wanted)

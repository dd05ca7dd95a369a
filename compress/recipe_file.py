"""Recipes as YAML files, checked by one strict schema per stage. Every refusal names the file, the line and the key."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from calibration.parts import Part
from compress.common.cli import Key, as_written, from_written, option
from compress.common.errors import DataError, RecipeError, SchemeError, nearest
from compress.common.files import read_text
from compress.evaluate.gate import parse_gate
from compress.recipe import CalibrationOptions, Recipe
from compress.search.space import Goal, SearchRequest
from compress.stages.base import STAGES, Stage

if TYPE_CHECKING:
    import pydantic
    import yaml

Built = TypeVar("Built")
Path_ = tuple[str | int, ...]
MAX_VALUES = 100_000
"""Far above any recipe; a few aliases of aliases would grow without bound."""


RECIPE: tuple[Key, ...] = (
    ("name", str, option(default="")),
    ("seed", int, option(default=0)),
    ("calibration", dict[str, Any], option(default=None)),
    ("stages", list[Any] | None, option(default=None)),
    ("search", dict[str, Any] | None, option(default=None)),
    ("gate", dict[str, float] | str, option(default=None)),
)
PART: tuple[Key, ...] = (("source", str, option(default=MISSING)), ("weight", float, option(default=1.0)))
"""Keys of a recipe, and of a part of its calibration text."""


def bundled_recipes() -> dict[str, Path]:
    """Return the recipes that ship with the package, by name."""
    folder = Path(str(files("recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str) -> Recipe:
    """Read a recipe with stages, by file or bundled name. Raises RecipeError as `load_work`, and for a search."""
    return parse_recipe(*_read(name))


def load_work(name: str) -> Recipe | SearchRequest:
    """Read a recipe file, or a bundled recipe by name: stages, or a search for them. Raises RecipeError: no such
    recipe, not YAML, or a key or value that is not allowed; with file, line and key."""
    return parse_work(*_read(name))


def _read(name: str) -> tuple[str, str]:
    """Return the text of a recipe, and the file that errors name."""
    path = bundled_recipes().get(name, Path(name))
    if not path.exists():
        raise RecipeError(f"recipe {name} does not exist", nearest(name, tuple(bundled_recipes()), "Bundled recipes"))
    return read_text(path, RecipeError), str(path)


def parse_recipe(text: str, origin: str) -> Recipe:
    """Parse a recipe with stages; `origin` is the file name that errors show. Raises RecipeError: as `load_work`, and
    for a search."""
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
        data: mappings, lists and scalars.
        lines: line of each value by its path.
    """

    origin: str
    data: Any = None
    lines: dict[Path_, int] = field(default_factory=dict)

    def plain(self, node: yaml.Node, path: Path_) -> Any:
        """Return a node as plain data, aliases as copies of what they name. Raises RecipeError: a key that is given
        twice, a bad scalar, or more than `MAX_VALUES` values."""
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
            kind = node.tag.rpartition(":")[2]
            raise self.refusal(
                path, f"{reprlib.repr(node.value)} is not a valid {kind}", "Correct the value"
            ) from error

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

    def values(self, keys: Iterable[Key], data: Any, path: Path_, what: str) -> dict[str, Any]:
        """Return the values of a mapping that is checked against the types of its keys. Raises RecipeError: no mapping,
        an unknown key, one without a default that is missing, or a value of another type."""
        from pydantic import ValidationError

        kinds = tuple((name, kind, each.default is MISSING) for name, kind, each in keys)
        known = tuple(name for name, *_ in kinds)
        if not isinstance(data, dict):
            raise self.refusal(path, f"{what} must be a mapping", f"Keys: {', '.join(known)}")
        try:
            return _schema(kinds).model_validate(data).model_dump(exclude_unset=True)
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
        values = self.values(RECIPE, self.data, (), "recipe")
        options: dict[str, Any] = {"name": values.get("name") or Path(self.origin).stem, "seed": values.get("seed", 0)}
        if "calibration" in values:
            options["calibration"] = self._calibration(values["calibration"])
        stages, search = values.get("stages"), values.get("search")
        if search is not None and stages is not None:
            raise self.refusal(("search",), "a recipe has stages or searches for them", "Remove one of them")
        gate = self.at(("gate",), lambda: parse_gate(values.get("gate", {})))
        if search is not None and gate:
            raise self.refusal(("gate",), "a search has a goal, and no gate of its own", "Give --gate to compress run")
        if search is not None:
            return self._search(search, options)
        built = tuple(self._stage(item, ("stages", index)) for index, item in enumerate(stages or []))
        return self.at((), lambda: Recipe(built, gate=gate, **options))

    def _search(self, data: Any, options: dict[str, Any]) -> SearchRequest:
        path = ("search",)
        values = self.values([*as_written(Goal), *as_written(SearchRequest)], data, path, "search")
        goal = self.at(path, lambda: from_written(Goal, values))
        return self.at(path, lambda: from_written(SearchRequest, values, goal=goal, **options))

    def _calibration(self, data: Any) -> CalibrationOptions:
        path = ("calibration",)
        values = self.values(as_written(CalibrationOptions), data, path, "calibration")
        if isinstance(values.get("source"), list):
            values["source"] = self._parts(values["source"])
        return self.at(path, lambda: from_written(CalibrationOptions, values))

    def _parts(self, data: list[Any]) -> tuple[Part, ...]:
        """Return a mixture of texts from a list of `{source, weight}`."""
        parts = []
        for index, item in enumerate(data):
            path = ("calibration", "source", index)
            values = self.values(PART, item, path, "part of the calibration")
            parts.append(self.at(path, partial(Part, **values)))
        return tuple(parts)

    def _stage(self, data: Any, path: Path_) -> Stage:
        if not isinstance(data, dict) or len(data) != 1:
            raise self.refusal(path, "a stage names one kind of work", "Write `- quantize: {method: awq}`")
        ((name, body),) = data.items()
        path = (*path, name)
        stage = self.at(path, lambda: STAGES.find(name))
        values = self.values(stage.written_keys(), body, path, name)
        return self.at(path, lambda: stage.build(values))


def _scalar(node: yaml.Node) -> Any:
    return _loader()("").construct_object(node, deep=True)


@cache
def _schema(keys: tuple[tuple[str, Any, bool], ...]) -> type[pydantic.BaseModel]:
    """Return a strict schema of keys, with their types and whether they are required."""
    from pydantic import ConfigDict, create_model

    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    wanted: dict[str, Any] = {name: (kind, ... if required else None) for name, kind, required in keys}
    return create_model("Keys", __config__=strict, **wanted)

"""YAML file of virtual models (`--route`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from compress.common.errors import ToolkitError, nearest
from compress.common.files import YamlPart, read_json, read_yaml
from runtime.routing.classifier import NUM_FEATURES, Classifier, Predictor
from runtime.routing.routes import Cascade, Route, Routes, Rule

T = TypeVar("T", Rule, Cascade, Classifier)
EXAMPLE = "Write 'auto: {rules: [{model: NAME, prompt_at_least: 1000}], otherwise: NAME}'"


def read_routes(file: Path, models: Collection[str]) -> Routes:
    """Returns the virtual models of a file.

    Args:
        models: names of the served models.

    Raises:
        ToolkitError: the file is wrong, or names a model that is not served; it names the place.
    """
    routes = {name: _read_route(part, models) for name, part in _mapping(read_yaml(file)).items()}
    if not routes:
        raise ToolkitError(f"{file} has no virtual model", EXAMPLE)
    for name in routes.keys() & set(models):
        raise ToolkitError(f"{file}: the virtual model {name!r} is named as a served model", "Give it another name")
    return routes


def _read_route(part: YamlPart, models: Collection[str]) -> Route:
    given = _mapping(part)
    _check_names(given, ("rules", "otherwise", "cascade", "classifier"))
    rules = given.get("rules", YamlPart(part.place, []))
    if not isinstance(rules.value, list):
        raise ToolkitError(f"{rules.place}: rules are not a list", EXAMPLE)
    if len(given.keys() & {"otherwise", "cascade", "classifier"}) != 1:
        remedy = "Write 'otherwise: NAME', or 'cascade: {small: NAME, large: NAME, threshold: -1.0}'"
        raise ToolkitError(f"{part.place}: a virtual model needs either otherwise or cascade, or classifier", remedy)
    readers = READERS | {name: _model_reader(models) for name in ("model", "small", "large")}
    otherwise: str | Cascade | Classifier
    if "cascade" in given:
        otherwise = _read(given["cascade"], Cascade, readers)
    elif "classifier" in given:
        otherwise = _read(given["classifier"], Classifier, readers)
    else:
        otherwise = readers["model"](given["otherwise"], "otherwise")
    return Route(tuple(_read(rule, Rule, readers) for rule in rules.value), otherwise)


def _read(part: YamlPart, kind: type[T], readers: Mapping[str, Callable[[YamlPart, str], Any]]) -> T:
    """Returns a rule or a cascade; its fields are those of the data class."""
    given = _mapping(part)
    _check_names(given, [field.name for field in fields(kind)])
    for field in fields(kind):
        if field.default is MISSING and field.name not in given:
            raise ToolkitError(f"{part.place}: {field.name} is missing", f"Write '{field.name}: VALUE'")
    return kind(**{name: readers[name](value, name) for name, value in given.items()})


def _mapping(part: YamlPart) -> dict[str, YamlPart]:
    if not isinstance(part.value, dict):
        raise ToolkitError(f"{part.place} is not a mapping", EXAMPLE)
    return part.value


def _check_names(given: Mapping[str, YamlPart], known: Collection[str]) -> None:
    for name in given.keys() - set(known):
        raise ToolkitError(f"{given[name].place}: unknown field {name!r}", nearest(name, known, "Fields"))


def _model_reader(models: Collection[str]) -> Callable[[YamlPart, str], str]:
    def read(part: YamlPart, name: str) -> str:
        if (text := part.text(name)) not in models:
            raise ToolkitError(
                f"{part.place}: {name} is {text!r}, which is not served", nearest(text, models, "Served")
            )
        return text

    return read


def _read_count(part: YamlPart, name: str) -> int:
    if not (text := part.text(name)).isdecimal():
        raise ToolkitError(f"{part.place}: {name} is {text!r}", "Write a whole number")
    return int(text)


def _read_flag(part: YamlPart, name: str) -> bool:
    if (text := part.text(name)) not in ("true", "false"):
        raise ToolkitError(f"{part.place}: {name} is {text!r}", "Write true or false")
    return text == "true"


def _read_threshold(part: YamlPart, name: str) -> float:
    text = part.text(name)
    try:
        threshold = float(text)
    except ValueError:
        threshold = math.nan
    if not threshold <= 0:
        raise ToolkitError(f"{part.place}: {name} is {text!r}", "Write a mean log-probability: 0 or less, such as -1.0")
    return threshold


def _read_pattern(part: YamlPart, name: str) -> re.Pattern[str]:
    text = part.text(name)
    try:
        return re.compile(text)
    except re.error as error:
        problem = f"{part.place}: {name} is not a regular expression: {error}"
        raise ToolkitError(problem, "Correct it; see the documentation of Python's module re") from error


def _read_divergence(part: YamlPart, name: str) -> float:
    text = part.text(name)
    try:
        return float(text)
    except ValueError:
        raise ToolkitError(f"{part.place}: {name} is {text!r}", "Write a KL divergence in nats, such as 0.5") from None


def _read_predictor(part: YamlPart, name: str) -> Predictor:
    file = Path(part.text(name))
    if not file.is_file():
        remedy = f"Write it: python scripts/train_router.py SMALL LARGE --output {file}"
        raise ToolkitError(f"{part.place}: {file} does not exist", remedy)
    found = read_json(file)
    try:
        predictor = Predictor(float(found["bias"]), tuple(map(float, found["weights"])))
    except (KeyError, TypeError, ValueError):
        predictor = Predictor(0.0, ())
    if len(predictor.weights) != NUM_FEATURES:
        problem = f"{file} does not hold a bias and {NUM_FEATURES} weights"
        raise ToolkitError(problem, "Write it by scripts/train_router.py")
    return predictor


COUNTS = ("prompt_at_least", "prompt_below", "answer_at_least", "answer_below", "tokens")
READERS: dict[str, Callable[[YamlPart, str], Any]] = {
    **dict.fromkeys(COUNTS, _read_count),
    "text": _read_pattern,
    "tools": _read_flag,
    "json": _read_flag,
    "threshold": _read_threshold,
    "predictor": _read_predictor,
    "most_kl": _read_divergence,
}

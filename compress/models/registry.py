"""The registry of model families, which are files of `compress.models.families` that register themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import compress.models.families
from compress.models.config import Config
from compress.models.spec import ModelSpec

Describe = Callable[[Config], ModelSpec]
"""Describes the model of a config.json; raises CheckpointError for one that defines no such model."""

_FAMILIES: dict[str, Describe] = {}


def register(*model_types: str) -> Callable[[Describe], Describe]:
    """Registers a family under the `model_type` values of its config.json.

    Raises:
        ValueError: another family has one of them.
    """

    def add(describe: Describe) -> Describe:
        if taken := [model_type for model_type in model_types if model_type in _FAMILIES]:
            raise ValueError(f"model_type {', '.join(taken)} is registered already")
        _FAMILIES.update(dict.fromkeys(model_types, describe))
        return describe

    return add


def find_family(model_type: object) -> Describe | None:
    """The family of a `model_type`, if there is one."""
    _import_families()
    return _FAMILIES.get(model_type) if isinstance(model_type, str) else None


def known_families() -> tuple[str, ...]:
    """Every registered `model_type`, sorted."""
    _import_families()
    return tuple(sorted(_FAMILIES))


@cache
def _import_families() -> None:
    for module in iter_modules(compress.models.families.__path__):
        import_module(f"{compress.models.families.__name__}.{module.name}")

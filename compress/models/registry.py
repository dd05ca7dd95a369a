"""The registry of model families, which are files of `compress.models.families` that register themselves, and of the
multimodal models around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import compress.models.families
from compress.models.config import Config
from compress.models.spec import ModelSpec

Describe = Callable[[Config], ModelSpec]
"""Describes the model of a config.json; raises CheckpointError for one that defines no such model."""

_FAMILIES: dict[str, Describe] = {}
_OTHER_NAMES: dict[str, str] = {}
_STORED: dict[str, str] = {}
_CONVERTED: set[str] = set()
_RENAMED: dict[str, tuple[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal model with a text model of a family.

    Attributes:
        text_type: `model_type` of a text model whose config names none.
        families: family of a text model by its `model_type`, where it has another name.
        defaults: what holds where the config of the text model says nothing.
        unread: keys of the text model's config that the multimodal model does not read.
        ties_head: whether the head is the embedding where config.json says nothing.
        text_ties: whether it also is where the config of the text model says so.
        is_flat: older files keep the keys of the text model at the top level of the config.
        divides_heads: a head has its share of `hidden_size`, whatever the config says.
    """

    text_type: str
    families: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    ties_head: bool = False
    text_ties: bool = False
    is_flat: bool = False
    divides_heads: bool = False


_WRAPPERS: dict[str, Wrapper] = {}


def register(
    *model_types: str,
    other_names: tuple[str, ...] = (),
    stored_as: str = "",
    renamed: tuple[str, str] | None = None,
    converted: bool = False,
) -> Callable[[Describe], Describe]:
    """Registers a family under the `model_type` values of its config.json.

    Args:
        other_names: values of `model_type` that transformers does not know.
        stored_as: what published files call the module `model`; "" for the same.
        renamed: pattern of names that transformers writes in place of the published ones, and what those have there.
        converted: the family has the names of transformers, and files those that its mapping for loading has.

    Raises:
        ValueError: another family has one of them.
    """

    def add(describe: Describe) -> Describe:
        if taken := [model_type for model_type in model_types if model_type in _FAMILIES]:
            raise ValueError(f"model_type {', '.join(taken)} is registered already")
        _FAMILIES.update(dict.fromkeys(model_types, describe))
        _OTHER_NAMES.update(dict.fromkeys(other_names, model_types[0]))
        _STORED.update(dict.fromkeys(model_types if stored_as else (), stored_as))
        _RENAMED.update(dict.fromkeys(model_types, renamed) if renamed else {})
        _CONVERTED.update(model_types if converted else ())
        return describe

    return add


def register_wrapper(model_type: str, wrapper: Wrapper, renamed: tuple[str, str] | None = None) -> None:
    """Registers a multimodal model. Raises ValueError for a `model_type` that is registered already.

    Args:
        renamed: as of `register`, for names of the text model.
    """
    if model_type in _WRAPPERS or model_type in _FAMILIES:
        raise ValueError(f"model_type {model_type} is registered already")
    _WRAPPERS[model_type] = wrapper
    _RENAMED.update({model_type: renamed} if renamed else {})


def find_wrapper(model_type: object) -> Wrapper | None:
    """The multimodal model of a `model_type`, if there is one."""
    _import_families()
    return _WRAPPERS.get(model_type) if isinstance(model_type, str) else None


def known_wrappers() -> tuple[str, ...]:
    """Every registered `model_type` of a multimodal model, sorted."""
    _import_families()
    return tuple(sorted(_WRAPPERS))


def find_family(model_type: object) -> Describe | None:
    """The family of a `model_type`, if there is one."""
    _import_families()
    return _FAMILIES.get(_OTHER_NAMES.get(model_type, model_type)) if isinstance(model_type, str) else None


def is_converted(model_type: object) -> bool:
    """Whether names in files are those of transformers' mapping for loading: of some families, and of all models that
    no family describes."""
    return find_family(model_type) is None or model_type in _CONVERTED


def find_stored_name(model_type: object) -> str:
    """Finds what published files of a family call the module `model`; "" for the same."""
    _import_families()
    return _STORED.get(model_type, "") if isinstance(model_type, str) else ""


def find_renaming(model_type: object) -> Callable[[str], str] | None:
    """Finds what gives tensors of a family their published names, where transformers writes other ones."""
    _import_families()
    if not isinstance(model_type, str) or model_type not in _RENAMED:
        return None
    pattern, published = _RENAMED[model_type]
    return partial(re.sub, pattern, published)


def known_families() -> tuple[str, ...]:
    """Every registered `model_type`, sorted."""
    _import_families()
    return tuple(sorted(_FAMILIES))


@cache
def _import_families() -> None:
    for module in iter_modules(compress.models.families.__path__):
        import_module(f"{compress.models.families.__name__}.{module.name}")

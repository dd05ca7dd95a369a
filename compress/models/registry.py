"""The registries of model families and of the multimodal models around them, which files of `compress.models.families`
fill."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from compress.common.registry import Registry
from compress.models.config import Config
from compress.models.spec import ModelSpec

Describe = Callable[[Config], ModelSpec]
"""Describes the model of a config.json; raises CheckpointError for one that defines no such model."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        stored_as: what published files call the module `model`; "" for the same.
        renamed: pattern of names that transformers writes in place of the published ones, and what those have there.
        converted: the family has the names of transformers, and files those that its mapping for loading has.
    """

    describe: Describe
    stored_as: str = ""
    renamed: tuple[str, str] | None = None
    converted: bool = False


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
        renamed: as of `Family`, for names of the text model.
    """

    text_type: str
    families: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    ties_head: bool = False
    text_ties: bool = False
    is_flat: bool = False
    divides_heads: bool = False
    renamed: tuple[str, str] | None = None


FAMILIES: Registry[Family] = Registry("model_type", "compress.models.families")
"""Families by the `model_type` of their config.json; values that transformers does not know are aliases."""
WRAPPERS: Registry[Wrapper] = Registry("model_type", "compress.models.families")
"""Multimodal models by `model_type`."""


def register(*model_types: str, aliases: tuple[str, ...] = (), **options: Any) -> Callable[[Describe], Describe]:
    """Registers a function as the family of `model_type` values, with fields of `Family` as options."""

    def add(describe: Describe) -> Describe:
        FAMILIES.register(*model_types, aliases=aliases)(Family(describe, **options))
        return describe

    return add


def find_family(model_type: Any) -> Describe | None:
    """The family of a `model_type`, if there is one."""
    family = FAMILIES.get(model_type)
    return family.describe if family else None


def is_converted(model_type: Any) -> bool:
    """Whether names in files are those of transformers' mapping for loading: of some families, and of all models that
    no family describes."""
    family = FAMILIES.get(model_type)
    return family is None or family.converted


def find_renaming(model_type: Any) -> Callable[[str], str] | None:
    """Finds what gives tensors of a family their published names, where transformers writes other ones."""
    entry = WRAPPERS.get(model_type) or FAMILIES.get(model_type)
    return partial(re.sub, *entry.renamed) if entry and entry.renamed else None

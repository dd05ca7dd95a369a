"""Names of files where no family describes a model, by the mapping that transformers has for loading it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

from compress.models.wrappers import StoredNames

WEIGHT = ".weight"
SPLIT, PREFIX_CHANGE = "Split", "PrefixChange"
"""Names of classes that transformers 5.20 and 5.10 added."""


def transforms_of(model_type: object) -> list[WeightTransform]:
    """Returns what transformers does to the tensors of a causal model of a type when it loads them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not isinstance(model_type, str):
        return []
    found = get_checkpoint_conversion_mapping(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    return found or get_checkpoint_conversion_mapping(model_type) or []


def splits_of(model_type: object) -> list[WeightConverter]:
    """Returns those of `transforms_of` that take one tensor of files apart into the rows of several."""
    found = (each for each in transforms_of(model_type) if isinstance(each, WeightConverter))
    return [each for each in found if [type(operation).__name__ for operation in each.operations] == [SPLIT]]


def joins(names: Iterable[str], model_type: object) -> bool:
    """Whether any of `names` is of a tensor that transformers takes apart."""
    splits = splits_of(model_type)
    return any(each.rename_source_key(name)[1] for name in names for each in splits)


def is_made(name: str, model_type: object) -> bool:
    """Whether transformers makes a tensor of others, or of another form, when it loads a model."""
    found = (each.reverse_transform() for each in transforms_of(model_type) if isinstance(each, WeightConverter))
    return any(each.rename_source_key(name)[1] for each in found)


@dataclass(frozen=True)
class ConvertedNames(StoredNames):
    """Names of modules in transformers, and in the files that it loads them from.

    Attributes:
        renamings, inverse: from names of files, and back, each in the order of their application.
    """

    renamings: tuple[WeightRenaming, ...]
    inverse: tuple[WeightRenaming, ...]
    others: frozenset[str] = frozenset()

    @classmethod
    def find(cls, stored: Iterable[str], model_type: object) -> ConvertedNames | None:
        """Finds what renames `stored` tensors; None where they have transformers' own names."""
        found = [each for each in transforms_of(model_type) if isinstance(each, WeightRenaming)]
        found = [each for each in found if type(each).__name__ != PREFIX_CHANGE]
        backwards = [each.reverse_transform() for each in found[::-1]]
        names = cls(tuple(found), tuple(each for each in backwards if isinstance(each, WeightRenaming)))
        read = list(stored)
        are_published = any(names.own(name) != name for name in read)
        return names if found and (are_published or all(names.stored(name) == name for name in read)) else None

    def own(self, stored: str) -> str:
        """Name in transformers of a stored tensor or module."""
        return _renamed(stored, self.renamings)

    def stored(self, own: str) -> str:
        """Stored name of a tensor or module of transformers."""
        return _renamed(own, self.inverse)

    def pattern(self, module: str, changed: Set[str] = frozenset()) -> str:
        """A name that fits files and transformers."""
        stored = self.stored(module)
        return module if stored == module else f"re:({module}|{stored})$".replace(".", r"\.")


def _renamed(name: str, renamings: Iterable[WeightRenaming]) -> str:
    # Patterns are of whole names of tensors, some with their ends: a module is known by its weight.
    found = f"{name}{WEIGHT}"
    for each in renamings:
        found, _ = each.rename_source_key(found)
    return found.removesuffix(WEIGHT)

"""The container of this toolkit, which holds every registered form: what compressed-tensors cannot say, and packed
embeddings. Defined in `docs/checkpoint-format.md`; other engines refuse it by its name, and read `compress export
--format dense`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.scheme import FORMS, stored_modules
from compress.checkpoint.weights import Scheme
from compress.common.errors import CheckpointError

NAME = "compress-runtime"


def suffixes(scheme: Scheme | None = None) -> tuple[str, ...]:
    """Suffixes of a module's stored tensors; without a scheme those of any module."""
    if scheme is not None:
        return scheme.suffixes
    return tuple(dict.fromkeys(suffix for form in FORMS.values() for suffix in form.suffixes))


def check(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when a weight `[O, I]` cannot be stored in this form."""
    scheme.check(shape)


def modules(names: Iterable[str]) -> list[str]:
    """Packed modules among tensor names."""
    return stored_modules(names)


def quantization_config(schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json: one group of modules for each scheme.

    It has no `quant_method` on purpose: transformers only warns of a method that it does not know, and goes on with
    random weights, but refuses a config that names none.
    """
    grouped: dict[Scheme, list[str]] = {}
    for module in sorted(schemes):
        grouped.setdefault(schemes[module], []).append(module)
    groups = [{"scheme": scheme.to_dict(), "modules": members} for scheme, members in grouped.items()]
    return {"format": NAME, "groups": groups, "ignore": sorted(ignored)}


def schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of every module. Raises CheckpointError for a stored module that no group lists."""
    listed = {
        module: Scheme.from_dict(group["scheme"]) for group in config.get("groups", ()) for module in group["modules"]
    }
    found = list(modules)
    if missing := [module for module in found if module not in listed]:
        raise CheckpointError(f"no group of quantization_config lists {missing[0]}, which is stored packed")
    return {module: listed[module] for module in found}

"""The container of this toolkit, which holds every registered form: what compressed-tensors cannot say, and packed
embeddings. Defined in `docs/checkpoint-format.md`; other engines refuse it by its name, and read `compress export
--format dense`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, VLLM, Container, modules_by_scheme
from compress.checkpoint.scheme import FORMS, stored_modules
from compress.checkpoint.weights import Scheme
from compress.common.errors import CheckpointError


class CompressRuntime(Container):
    """This toolkit's own."""

    name = "compress-runtime"
    engines = RUNTIME, VLLM
    keys = "format groups"

    def suffixes(self, scheme: Scheme | None = None) -> tuple[str, ...]:
        if scheme is not None:
            return scheme.suffixes
        return tuple(dict.fromkeys(suffix for form in FORMS.values() for suffix in form.suffixes))

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        scheme.check(shape)

    def modules(self, names: Iterable[str]) -> list[str]:
        return stored_modules(names)

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` of config.json: one group of modules for each scheme.

        It has no `quant_method` on purpose: transformers only warns of a method that it does not know, and goes on with
        random weights, but refuses a config that names none.
        """
        groups = [
            {"scheme": scheme.to_dict(), "modules": members} for scheme, members in modules_by_scheme(schemes).items()
        ]
        return {"format": self.name, "groups": groups, "ignore": sorted(ignored)}

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module. Raises CheckpointError for a stored module that no group lists."""
        listed = {
            module: Scheme.from_dict(group["scheme"])
            for group in config.get("groups", ())
            for module in group["modules"]
        }
        found = list(modules)
        if missing := [module for module in found if module not in listed]:
            raise CheckpointError(f"no group of quantization_config lists {missing[0]}, which is stored packed")
        return {module: listed[module] for module in found}


COMPRESS_RUNTIME = CONTAINERS.register(order=7)(CompressRuntime())

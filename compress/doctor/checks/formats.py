"""Formats: the container, the weight forms in it, and the engines that load both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from compress.checkpoint.config import compression_block
from compress.checkpoint.formats.readers import RUNTIME, readers
from compress.checkpoint.reader import GROUP_INDEX
from compress.doctor.base import Check, register
from compress.doctor.findings import Finding
from compress.doctor.view import listed


@register
class Formats(Check):
    """States the container and its forms, and finds layouts that no kernel multiplies."""

    name: ClassVar[str] = "formats"

    def start(self) -> Iterator[Finding]:
        packed = self.view.packed
        if packed is None:
            return
        owners = [
            name for name in packed.modules if any(each.endswith(GROUP_INDEX) for each in packed.packed_names(name))
        ]
        mixed = [module for module in owners if packed.column_order(module) is not None]
        if mixed:
            columns = "columns in the order of activations (desc_act), which no kernel here multiplies"
            problem = f"{len(mixed)} modules have {columns}: {listed(mixed)}"
            remedy = f"Quantize it anew from these values: compress quantize {self.view.path} --out OTHER"
            yield self.warning("activation-order", mixed[0], problem, remedy)

    def facts(self) -> dict[str, str]:
        packed = self.view.packed
        if packed is None:
            return {}
        counts = Counter(str(scheme) for scheme in packed.schemes.values())
        forms = ", ".join(f"{count} x {form}" for form, count in sorted(counts.items())) or "none"
        loaded = readers(packed.format, packed.schemes.values()) or [RUNTIME]
        made = compression_block(packed.config).get("source")
        origin = {"made from": str(made)} if made else {}
        return {"container": packed.format, "weight forms": forms, "loaded by": ", ".join(loaded), **origin}

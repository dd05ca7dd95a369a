"""Formats: container, weight forms, and engines that load both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from compress.checkpoint.activations import AS_STORED
from compress.checkpoint.config import compression_block
from compress.checkpoint.formats.base import RUNTIME
from compress.checkpoint.formats.readers import described, readers
from compress.checkpoint.reader import REORDERED, PackedCheckpoint
from compress.doctor.base import CHECKS, Check
from compress.doctor.findings import Finding
from compress.doctor.view import listed


@CHECKS.register()
class Formats(Check):
    """Describes container and weight forms, and finds layouts without a kernel."""

    name: ClassVar[str] = "formats"

    def start(self) -> Iterator[Finding]:
        packed = self.view.packed
        mixed = packed.reordered if packed else []
        if mixed:
            problem = f"{len(mixed)} modules have {REORDERED}: {listed(mixed)}"
            remedy = f"Quantize it again from these values: compress quantize {self.view.path} --out OTHER"
            yield self.warning("activation-order", mixed[0], problem, remedy)

    def facts(self) -> dict[str, str]:
        packed = self.view.packed
        if packed is None:
            return {}
        files, folded = packed.files, dict[str, str]()
        if files.folded and files.packed:
            packed, folded = files.packed, {"transforms": f"{', '.join(files.folded)}, folded into values in 16 bits"}
        counts = Counter(str(scheme) for scheme in packed.schemes.values())
        forms = ", ".join(f"{count} x {form}" for form, count in sorted(counts.items())) or "none"
        engines = readers(packed.format, packed.config, packed.schemes.values())
        if packed.reordered:  # nothing was measured with such files
            engines = [replace(each, loads=None, refusal="") for each in engines]
        refused = bool(packed.reordered or self.view.model_refusal)
        known = [each for each in engines if not (refused if each.engine == RUNTIME else folded)]
        made = compression_block(packed.config).get("source")
        origin = {"made from": str(made)} if made else {}
        facts = {"container": packed.format, "weight forms": forms, **_inputs(packed, bool(folded)), **folded}
        facts |= described(known)
        return facts | origin


def _inputs(packed: PackedCheckpoint, is_folded: bool) -> dict[str, str]:
    """Returns the rounding of inputs that is stored, and what computes it; nothing where there is none."""
    if not packed.inputs:
        return {}
    computed = f"compress eval and --activations {AS_STORED} round so; 16 bits when served"
    folded = "16 bits, since transforms are folded into weights"
    return {"inputs": f"{packed.describe_inputs()}; {folded if is_folded else computed}"}

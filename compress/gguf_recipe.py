"""Stages that choose the codes of a GGUF file, each matrix in the type that a mix gives it. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from compress.checkpoint.gguf.mixes import FLOATS
from compress.checkpoint.weights import Int, Scheme
from compress.common.errors import RecipeError
from compress.methods.base import QUANTIZATION
from compress.stages.quantize import QuantizeStage, form_of

INTEGERS: dict[str, Scheme] = {"q4_0": Int(4, 32), "q5_0": Int(5, 32), "q8_0": Int(8, 32)}
"""Forms whose codes a type holds; the other types are forms of their own."""


def stages_of(types: Mapping[str, str], method: str) -> tuple[QuantizeStage, ...]:
    """Returns a stage for each type: that of most matrices first, which takes all linears. Raises RecipeError: a method
    that needs no calibration or does not exist, or a mix without codes."""
    QUANTIZATION.find(method)
    left_out = tuple(module for module, name in types.items() if name in FLOATS)
    counts = Counter(name for name in types.values() if name not in FLOATS)
    if not counts:
        raise RecipeError(f"--method {method} chooses no codes of floats", "Use --gguf-type q4_k_m")
    first, *others = (name for name, _ in counts.most_common())
    stages = [QuantizeStage(method, _scheme(first), ignore=left_out)]
    for kind in others:
        modules = (module for module, name in types.items() if name == kind)
        targets = dict.fromkeys(re.sub(r"\.experts\.\d+\.", ".experts.*.", module) for module in modules)
        stages.append(QuantizeStage(method, _scheme(kind), targets=tuple(targets)))
    return tuple(stages)


def _scheme(name: str) -> Scheme:
    return INTEGERS.get(name) or form_of(name).target()

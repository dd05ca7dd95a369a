"""From how many tokens a packed weight is multiplied by dense panels: policy over times measured on a GPU. No torch.

The table is JSON, `{"device": name, "shape": "NxK", "source": text, "microseconds": {form: {"M": number}}}`; forms have
the names of `scripts/bench_kernels.py gpu`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from runtime.backends.triton.kernels.configs import BUCKETS

TABLE = Path(__file__).parent / "times" / "nvidia-h200.json"
DENSE, EXPANDED = "cuBLAS bf16", "int4 g128"
"""The dense product, and a form that panels multiply for the most tokens of the table."""
NEVER = 2**31 - 1

Times = Mapping[int, float]
"""Microseconds of a product by number of tokens."""


def panel_from(forms: Mapping[str, Times], form: str) -> int:
    """Fewest tokens, a power of two, from which panels are faster than the fused product of a form; `NEVER` if none.

    A panel takes the time of the dense product and that of dequantizing, which does not depend on the tokens.
    """
    dense, expanded = forms[DENSE], forms[EXPANDED]
    most = max(dense.keys() & expanded.keys())
    dequantizing = expanded[most] - dense[most]
    faster = (tokens for tokens in BUCKETS if time_of(dense, tokens) + dequantizing < time_of(forms[form], tokens))
    return next(faster, NEVER)


def time_of(times: Times, tokens: int) -> float:
    """Microseconds for a number of tokens, on a straight line between the measured numbers around it, or beyond them on
    that of the nearest two."""
    lines = list(pairwise(sorted(times.items())))
    (first, low), (last, high) = next((line for line in lines if tokens <= line[1][0]), lines[-1])
    return low + (high - low) * (tokens - first) / (last - first)


@cache
def measured_panel_from(form: str) -> int:
    """Computes `panel_from` by the table of the package. Its card stands for others: on a faster one both ways gain."""
    measured = json.loads(TABLE.read_text(encoding="utf-8"))["microseconds"]
    return panel_from({name: {int(m): time for m, time in times.items()} for name, times in measured.items()}, form)

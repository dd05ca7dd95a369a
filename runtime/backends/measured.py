"""Speeds of one kernel over another that were measured on one GPU or processor, and what follows from them. No torch.

A table is JSON, `{"device": name, "speedups": {scheme: {"NxK": {"M": ratio}}}}`: above 1 the kernel is faster for M
tokens. `scripts/bench_kernels.py gpu --write-tables` and `scripts/bench_kernels.py cpu --write-tables` write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from compress.common.errors import DataError

LEAST = 1.05
"""Mean speed-up from which the other kernel is taken: two measurements may differ by less."""

Speedups = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Speed-ups by scheme, shape `NxK` and number of tokens."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a kernel is taken without being asked for, and why or why not."""

    is_faster: bool
    reason: str


def table_path(folder: Path, device: str) -> Path:
    """File of a device in a folder of tables, by the name that its driver or the operating system gives."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def read_speedups(path: Path, device: str) -> Speedups:
    """The measured speed-ups of a device; none where there is no table of it.

    Raises:
        DataError: the file is no such table.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        speedups: Speedups = content["speedups"] if content["device"] == device else {}
        judge(speedups, "", 0)
        return speedups
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no table of speed-ups: {error}", "Write one with bench_kernels.py") from error


def judge(speedups: Speedups, scheme: str, in_features: int | None, default: bool = False) -> Verdict:
    """Judges by the geometric mean over all measured numbers of tokens of all shapes with these inputs.

    Args:
        in_features: None for shapes with any number of inputs.
        default: the verdict where nothing was measured.
    """
    shapes = speedups.get(scheme, {})
    ratios = [
        ratio
        for shape, by_tokens in shapes.items()
        if in_features is None or shape.partition("x")[2] == str(in_features)
        for ratio in by_tokens.values()
    ]
    if not ratios:
        inputs = "" if in_features is None else f" with {in_features} inputs"
        return Verdict(default, f"was not measured on this device for {scheme}{inputs}")
    mean = geometric_mean(ratios)
    return Verdict(mean >= LEAST, f"was measured {mean:.2f} times as fast as what it replaces ({len(ratios)} figures)")


def to_json(device: str, speedups: Speedups) -> str:
    """The table that `read_speedups` reads."""
    return json.dumps({"device": device, "speedups": speedups}, indent=1) + "\n"

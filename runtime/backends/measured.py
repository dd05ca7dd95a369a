"""Speeds of one kernel over another that were measured on one GPU or processor, and what follows from them. No torch.

A table is JSON, `{"device": name, "speedups": {scheme: {"NxK": {"M": ratio}}}}`: above 1 the kernel is faster for M
tokens. That of a GPU has its compute capability, `"capability": [major, minor]`, and stands for all cards of that.
`scripts/bench_kernels.py gpu --write-tables` and `scripts/bench_kernels.py cpu --write-tables` write it.
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


def measured_gpu(folder: Path, name: str, capability: tuple[int, int]) -> str:
    """Returns the name of the GPU whose table holds for one: itself, or else one of its compute capability; "" for
    none."""
    if table_path(folder, name).is_file():
        return name
    tables = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return next((table["device"] for table in tables if table.get("capability") == list(capability)), "")


def read_speedups(path: Path, device: str) -> Speedups:
    """The measured speed-ups of a device; none where there is no table of it.

    Raises:
        DataError: the file is not such a table.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        speedups: Speedups = content["speedups"] if content["device"] == device else {}
        judge(speedups, "", None)
        return speedups
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a table of speed-ups: {error}", "Write one with bench_kernels.py") from error


def judge(speedups: Speedups, scheme: str, in_features: int | None, default: bool = False, device: str = "") -> Verdict:
    """Judges by the geometric mean over all measured numbers of tokens of all shapes with these inputs, or of all
    shapes where none has them.

    Args:
        in_features: None for shapes with any number of inputs.
        default: the verdict where nothing was measured.
        device: whose figures these are, where it is another one.
    """
    shapes = speedups.get(scheme, {})
    of_inputs = [figures for shape, figures in shapes.items() if shape.partition("x")[2] == str(in_features)]
    ratios = [ratio for figures in of_inputs or shapes.values() for ratio in figures.values()]
    if not ratios:
        return Verdict(default, f"was not measured on this device for {scheme}")
    mean, where = geometric_mean(ratios), f" on {device}" if device else ""
    figures = f"{len(ratios)} figures{where}"
    return Verdict(mean >= LEAST, f"was measured {mean:.2f} times as fast as what it replaces ({figures})")


def to_json(device: str, speedups: Speedups, capability: tuple[int, int] | None = None) -> str:
    """The table that `read_speedups` reads."""
    of_gpu = {} if capability is None else {"capability": capability}
    return json.dumps({"device": device, **of_gpu, "speedups": speedups}, indent=1) + "\n"

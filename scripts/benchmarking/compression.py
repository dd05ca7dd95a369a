"""One compression through the library, timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarking.memory import peak_host_bytes
from compress.recipe import CalibrationOptions, Recipe, Stage


class Stopwatch:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._processor


@dataclass(frozen=True)
class Compressed:
    """A finished compression.

    Attributes:
        seconds: of the pipeline, from opening the model to the verified checkpoint.
        cpu_seconds: processor time of the same, all threads together.
        micro_batch: sequences that ran at once.
        dtype: in which the calibration ran.
        bits_per_weight: stored bits per quantized weight: codes, scales, zero points.
        total_bytes: size of the weight files.
        peak_bytes: the most memory this process ever held.
    """

    out: Path
    seconds: float
    cpu_seconds: float
    micro_batch: int
    dtype: str
    bits_per_weight: float
    total_bytes: int
    peak_bytes: int


def compress(
    model: Path, out: Path, stages: Sequence[Stage], calibration: CalibrationOptions, seed: int = 0, **where: str
) -> Compressed:
    """Runs the pipeline that `compress quantize` runs, without its closing measurement of quality.

    Args:
        where: `device` and `dtype` of the calibration.
    """
    from compress.pipeline.prepare import RunRequest, prepare
    from compress.pipeline.run import run

    request = RunRequest(model, str(model), Recipe(tuple(stages), calibration, seed), out, measure=False, **where)
    prepare(request)  # imports what the model needs, which is no part of the work
    started = Stopwatch()
    prepared = prepare(request)
    structure = run(prepared, quiet=True).structure
    seconds, cpu_seconds = started.read()
    dtype = str(prepared.dtype).removeprefix("torch.")
    sizes = structure.bits_per_weight, structure.total_bytes, peak_host_bytes()
    return Compressed(out, seconds, cpu_seconds, prepared.micro_batch, dtype, *sizes)

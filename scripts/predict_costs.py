"""Predicted size, memory and time of weight forms and methods, by model size: the tables of docs/choosing.md.

Only shapes are read: of each model the headers of its file are written, and no numbers. Sizes and memory are those that
`compress fit` and `compress quantize --dry-run` count. Time is a model: passes over the dense blocks that a method was
measured to take, times the products of one pass, at a speed. Examples:

    python scripts/predict_costs.py
    python scripts/predict_costs.py --gflops 120 --methods rtn gptq
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarking.models import SHAPES, write_headers
from benchmarking.tables import Row, markdown_table

from compress.checkpoint.config import read_config
from compress.checkpoint.scheme import Scheme, targets
from compress.checkpoint.weights import Int
from compress.common.errors import ToolkitError
from compress.fit import ServingTarget, choose, needed_bytes, weight_bytes
from compress.pipeline.memory import estimate_peak, first_micro_batch
from compress.pipeline.prepare import RunContext, RunRequest, prepare
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import QuantizeStage
from runtime.core.model_config import DecoderConfig, parse_config

MODELS = {"1B": SHAPES["1.1b"], "8B": SHAPES["8b"], "70B": SHAPES["70b"]}
FORMS: dict[str, Scheme | None] = {
    "16 bits": None,
    "w8g128": Int(8, 128),
    "w4g64": Int(4, 64),
    "w4g128": Int(4, 128),
    "nvfp4": targets()["nvfp4"].target(),
    "q4_k": targets()["q4_k"].target(),
    "w3g64": Int(3, 64),
    "w2g64": Int(2, 64),
}
PASSES = {"rtn": 0.35, "awq": 3.3, "gptq": 3.4, "gptaq": 6.3, "signround": 18.7}
"""Processor time of a method over that of a dense pass through the same blocks. RTN, AWQ and GPTQ were measured on the
1.1B shape (docs/measurements/compression.md), GPTAQ and SignRound next to GPTQ on the demo model (there, and
docs/measurements/methods.md)."""
DENSE_GFLOPS = 475.0
"""Speed of the dense pass of the 1.1B shape on two cores of an AMD EPYC with bfloat16 products:
docs/measurements/compression.md."""
CONTEXT, BFLOAT16 = 8192, 2
DEVICES = {"GPU": True, "CPU": False}


class Machine(NamedTuple):
    """Memory in GiB to serve in, users with full contexts, and the bandwidth in GB/s that is assumed."""

    device: str
    memory: int
    users: int
    bandwidth: int

    @property
    def target(self) -> ServingTarget:
        memory, speed = self.memory << 30, self.bandwidth * 1e9
        return ServingTarget(memory, CONTEXT, self.users, DEVICES[self.device], bytes_per_second=speed)

    def __str__(self) -> str:
        return f"{self.device}, {self.memory} GiB, {self.users} user{'s' if self.users > 1 else ''}"


MACHINES = tuple(
    Machine(*facts, users, bandwidth)
    for *facts, bandwidth in (("CPU", 16, 50), ("CPU", 64, 50), ("GPU", 24, 900), ("GPU", 80, 3350))
    for users in (1, 8)
)


class Model(NamedTuple):
    """A model without weights: name and path of its config.json."""

    name: str
    path: Path


def form_rows(models: Sequence[Model]) -> Iterator[Row]:
    """Yields GiB for every form: of the file, and to serve one user on a GPU and on a CPU."""
    described = {each.name: parse_config(read_config(each.path)) for each in models}
    for name, scheme in FORMS.items():
        row = {"form": name}
        for size, model in described.items():
            weights = weight_bytes(model, scheme)
            single = [ServingTarget(0, CONTEXT, 1, is_gpu) for is_gpu in DEVICES.values()]
            needed = [needed_bytes(model, target, "16bit", weights) for target in single]
            row[size] = _gib(weights, *needed)
        yield row


def machine_rows(models: Sequence[Model]) -> Iterator[Row]:
    """Yields what `compress fit` chooses for every machine, with its predicted KL and modelled tokens per second."""
    described = {each.name: parse_config(read_config(each.path)) for each in models}
    for machine in MACHINES:
        yield {"machine": str(machine), **{size: _choice(model, machine) for size, model in described.items()}}


def _choice(model: DecoderConfig, machine: Machine) -> str:
    try:
        found = choose(model, machine.target)
    except ToolkitError:
        return "nothing fits"
    speed = machine.users * found.user_rate(machine.target)
    kv_cache = "" if found.kv_cache == "16bit" else f", {found.kv_cache} keys and values"
    return f"{found.weights}{kv_cache}: {found.kl:.3f}, {speed:,.0f}"


def _gib(*counts: int) -> str:
    return " / ".join(f"{count / 2**30:.1f}" for count in counts)


def plan(model: Model, method: str) -> RunContext:
    """Prepares a run of a method at w4 g128 that is never started."""
    recipe = Recipe((QuantizeStage(method, Int(4, 128)),), CalibrationOptions())
    request = RunRequest(model.path, str(model.path), recipe, model.path / "packed", "cpu", "bfloat16")
    return prepare(request, dry_run=True)


def method_row(method: str, models: Sequence[Model], gflops: float) -> Row:
    """Returns peak GiB on a CPU and of a GPU alone, and time on a CPU."""
    row = {"method": method, "dense passes": f"{PASSES[method]:g}"}
    for model in models:
        found = plan(model, method)
        peaks = found.peak_memory, _gpu_peak(found)
        row[model.name] = f"{_gib(*peaks)}, {_duration(found, PASSES[method], gflops)}"
    return row


def _gpu_peak(found: RunContext) -> int:
    """Returns the memory of a GPU with its batches."""
    count, length = found.sequences.tokens.shape if found.sequences else (0, 1)
    batch = min(first_micro_batch(length, "cuda"), max(count, 1))
    return estimate_peak(found.skeleton, found.plan, count, length, batch, BFLOAT16).device


def _duration(found: RunContext, passes: float, gflops: float) -> str:
    options = CalibrationOptions()
    weights = sum(row.parameters for row in found.plan.packed)
    seconds = passes * 2 * weights * options.samples * options.length / (gflops * 1e9)
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="sizes of models")
    parser.add_argument("--methods", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--gflops", type=float, default=DENSE_GFLOPS, help="speed of dense products, 1e9 per second")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory() as work:
        models = [Model(name, Path(work) / name) for name in options.models]
        for model in models:
            write_headers(model.path, MODELS[model.name])
        print(markdown_table(list(form_rows(models))))
        print(markdown_table(list(machine_rows(models))))
        print(markdown_table([method_row(method, models, options.gflops) for method in options.methods]))


if __name__ == "__main__":
    main()

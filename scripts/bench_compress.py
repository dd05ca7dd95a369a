"""Time, memory and size of each method on a random-weight Llama of a real shape, next to one dense forward pass.

Every row is measured in a process of its own, so its peak memory is its own. A method's seconds are those of the whole
pipeline: reading, calibrating, rounding, writing, verifying. The dense pass is what calibration cannot do without: the
blocks (no output head) over the same tokens, weights already in memory, in the same dtype. Where other work shares the
processor, trust the ratio in CPU time. Examples:

    python scripts/bench_compress.py --shape 125m --num-calibration-samples 16
    python scripts/bench_compress.py --shape 1.1b --num-calibration-samples 64 --max-seq-length 512 --rows costs.jsonl
    python scripts/bench_compress.py --shape 1.1b --layers 2 --num-calibration-samples 64
    python scripts/bench_compress.py --shape 8b --layers 2 --max-seq-length 2048 --device cuda
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarking.gpu.models import room_for_models
from benchmarking.machine import (
    Stopwatch,
    attempt,
    environment,
    in_own_process,
    leave_with,
    peak_device_bytes,
    peak_host_bytes,
)
from benchmarking.models import SHAPES, Cost, compress, write_calibration, write_model
from benchmarking.tables import Row, Rows, print_table
from rich.console import Console

from compress.checkpoint.weights import Int, Scheme
from compress.methods.base import QUANTIZATION
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage, group_size_from

DENSE_PASS = "dense forward"


@dataclass(frozen=True)
class Setup:
    """Settings that all rows of one benchmark share."""

    model: Path
    calibration: CalibrationOptions
    scheme: Scheme
    device: str
    dtype: str


def measure_method(setup: Setup, method: str) -> Cost:
    """The whole pipeline, once."""
    out = setup.model.parent / f"packed-{method}"
    stage = QuantizeStage(method, setup.scheme)
    cost = compress(setup.model, out, [stage], setup.calibration, devices=setup.device, dtype=setup.dtype)
    shutil.rmtree(out)
    return cost


def measure_dense_pass(setup: Setup) -> Cost:
    """The blocks over all calibration tokens, in the micro-batches that the pipeline begins with."""
    import torch
    from transformers import AutoModelForCausalLM

    from calibration.sequences import load_tokenizer, pack_sequences
    from calibration.sources import load_texts
    from compress.common.device import resolve_devices
    from compress.pipeline.memory import first_micro_batch
    from compress.pipeline.prepare import pick_dtype

    device = resolve_devices(setup.device)[0]
    dtype = pick_dtype(setup.dtype, "bfloat16", device)
    options = setup.calibration
    tokens = pack_sequences(
        load_texts(options.source),
        load_tokenizer(setup.model),
        samples=options.samples,
        length=options.length,
    ).tokens
    blocks = AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype).to(device).model
    with torch.inference_mode():
        blocks(tokens[:1].to(device), use_cache=False)
        started = Stopwatch()
        for batch in tokens.split(first_micro_batch(options.length, device.type)):
            blocks(batch.to(device), use_cache=False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times = started.read()
    return Cost(*times, peak_host_bytes(), peak_device_bytes(), str(dtype).removeprefix("torch."))


def table_rows(costs: Mapping[str, Cost], parameters: int) -> list[Row]:
    """As printed: each next to the dense pass."""
    dense = costs[DENSE_PASS]
    return [
        {
            "work": name,
            "seconds": f"{cost.seconds:.1f}",
            "x dense forward": f"{cost.seconds / dense.seconds:.2f}",
            "x in CPU time": f"{cost.cpu_seconds / dense.cpu_seconds:.2f}",
            "s per 1e9 weights": f"{cost.seconds / parameters * 1e9:.0f}",
            "peak RSS MB": f"{cost.peak_host_bytes / 1e6:,.0f}",
            "peak GPU MB": "-" if cost.peak_device_bytes is None else f"{cost.peak_device_bytes / 1e6:,.0f}",
            "bits/weight": "-" if cost.bits_per_weight is None else f"{cost.bits_per_weight:.3f}",
            "MB": "-" if cost.total_bytes is None else f"{cost.total_bytes / 1e6:,.1f}",
            "dtype": cost.dtype,
        }
        for name, cost in costs.items()
    ]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=("tiny", "125m", "1.1b", "8b", "8b-8k"))
    parser.add_argument("--layers", type=int, help="fewer layers of that shape; time per layer is the same")
    parser.add_argument("--methods", nargs="+", default=[*QUANTIZATION], choices=[*QUANTIZATION])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128, help="-1: one group per output channel")
    parser.add_argument("--num-calibration-samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--max-seq-length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, or several such as cpu,cpu")
    parser.add_argument("--dtype", default="auto", help="of the forward passes: auto, bfloat16, float32, ...")
    parser.add_argument("--work", type=Path, help="folder for the model; default: a temporary one")
    parser.add_argument("--rows", type=Path, help="append each figure here, as a line of JSON")
    parser.add_argument("--most-seconds", type=int, default=0, help="of a method, which is killed then; 0: no limit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
    with tempfile.TemporaryDirectory(dir=options.work or room_for_models()) as work:
        return _run(options, Path(work), console)


def write_inputs(
    work: Path, shape: str, layers: int, samples: int, length: int, device: str
) -> tuple[int, dict[str, Any]]:
    """Writes model and calibration text into `work`; returns the number of weights, and versions and hardware."""
    write_calibration(work / "calibration.jsonl", samples * length)
    return write_model(work / "model", replace(SHAPES[shape], layers=layers), device=device), environment()


def _run(options: argparse.Namespace, work: Path, console: Console) -> int:
    from compress.common.device import resolve_devices

    layers = options.layers or SHAPES[options.shape].layers
    samples, length = options.num_calibration_samples, options.max_seq_length
    device = in_own_process(resolve_devices, options.device)[0].type
    parameters, facts = in_own_process(write_inputs, work, options.shape, layers, samples, length, device)
    scheme = Int(options.bits, group_size_from(options.group_size))
    facts |= {
        "shape": f"{options.shape} of {layers} layers, random weights in bfloat16",
        "parameters": parameters,
        "calibration": f"{samples} x {length} tokens",
        "scheme": str(scheme),
    }
    rows = Rows(options.rows)
    rows.add(**facts)
    calibration = CalibrationOptions(str(work / "calibration.jsonl"), samples, length)
    setup = Setup(work / "model", calibration, scheme, options.device, options.dtype)
    costs: dict[str, Cost] = {}
    for method in (DENSE_PASS, *options.methods):
        measure, given = (measure_dense_pass, ()) if method == DENSE_PASS else (measure_method, (method,))
        own = Rows(options.rows, what=method)
        if (found := attempt(options.most_seconds, own, measure, setup, *given)) is not None:
            costs[method] = found
            peak = found.peak_device_bytes or found.peak_host_bytes
            own.add(seconds_a_layer=found.seconds / layers, peak_gigabytes=peak / 1e9, **asdict(found))
    if DENSE_PASS in costs:
        print_table("One process for each row", table_rows(costs, parameters), console)
    return int(len(costs) <= len(options.methods))


if __name__ == "__main__":
    leave_with(main)

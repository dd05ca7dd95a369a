"""Time, memory and size of each method on a random-weight Llama of a real shape, beside one dense forward pass.

Every row is measured in a process of its own, so its peak memory is its own. A method's seconds are those of the whole
pipeline: reading, calibrating, rounding, writing, verifying. The dense pass is what calibration cannot do without: the
blocks (no output head) over the same tokens, weights already in memory, in the same dtype. Where other work shares the
processor, trust the ratio in CPU time. Examples:

    python scripts/bench_compress.py --shape 125m --num-calibration-samples 16
    python scripts/bench_compress.py --shape 1.1b --num-calibration-samples 64 --max-seq-length 512 --json compress.json
    python scripts/bench_compress.py --shape 1.1b --layers 2 --num-calibration-samples 64
    python scripts/bench_compress.py --shape 8b --num-calibration-samples 128 --max-seq-length 2048 --device cuda
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarking.machine import in_own_process, leave_with, peak_device_bytes, peak_host_bytes
from benchmarking.tables import Row, describe, print_table, write_json
from rich.console import Console

from compress.checkpoint.weights import Int, Scheme
from compress.methods.base import names
from compress.recipe import CalibrationOptions, QuantizeStage, group_size_from

DENSE_PASS = "dense forward"


@dataclass(frozen=True)
class Setup:
    """Settings that all rows of one benchmark share."""

    model: Path
    calibration: CalibrationOptions
    scheme: Scheme
    device: str
    dtype: str


@dataclass(frozen=True)
class Measured:
    """One row. `bits_per_weight` and `total_bytes` are None for the dense pass."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_host_bytes: int
    peak_device_bytes: int | None
    dtype: str
    bits_per_weight: float | None = None
    total_bytes: int | None = None


def measure_method(setup: Setup, method: str) -> Measured:
    """The whole pipeline, once."""
    from benchmarking.models import compress

    out = setup.model.parent / f"packed-{method}"
    stage = QuantizeStage(method, setup.scheme)
    made = compress(setup.model, out, [stage], setup.calibration, device=setup.device, dtype=setup.dtype)
    shutil.rmtree(out)
    peaks = made.peak_bytes, peak_device_bytes()
    return Measured(method, made.seconds, made.cpu_seconds, *peaks, made.dtype, made.bits_per_weight, made.total_bytes)


def measure_dense_pass(setup: Setup) -> Measured:
    """The blocks over all calibration tokens, in the micro-batches that the pipeline begins with."""
    import torch
    from benchmarking.machine import Stopwatch
    from transformers import AutoModelForCausalLM

    from calibration.sequences import load_tokenizer, pack_sequences
    from calibration.sources import load_texts
    from compress.common.device import resolve_device
    from compress.pipeline.memory import first_micro_batch
    from compress.pipeline.prepare import pick_dtype

    device = resolve_device(setup.device)
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
    return Measured(DENSE_PASS, *times, peak_host_bytes(), peak_device_bytes(), str(dtype).removeprefix("torch."))


def table_rows(rows: Sequence[Measured], parameters: int) -> list[Row]:
    """As printed. The first row is the dense pass that the others are compared with."""
    return [
        {
            "work": row.name,
            "seconds": f"{row.seconds:.1f}",
            "x dense forward": f"{row.seconds / rows[0].seconds:.2f}",
            "x in CPU time": f"{row.cpu_seconds / rows[0].cpu_seconds:.2f}",
            "s per 1e9 weights": f"{row.seconds / parameters * 1e9:.0f}",
            "peak RSS MB": f"{row.peak_host_bytes / 1e6:,.0f}",
            "peak GPU MB": "-" if row.peak_device_bytes is None else f"{row.peak_device_bytes / 1e6:,.0f}",
            "bits/weight": "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.3f}",
            "MB": "-" if row.total_bytes is None else f"{row.total_bytes / 1e6:,.1f}",
            "dtype": row.dtype,
        }
        for row in rows
    ]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=("tiny", "125m", "1.1b", "8b"))
    parser.add_argument("--layers", type=int, help="fewer layers of that shape; time per layer is the same")
    parser.add_argument("--methods", nargs="+", default=names("quantize"), choices=names("quantize"))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128, help="-1: one group per output channel")
    parser.add_argument("--num-calibration-samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--max-seq-length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="of the forward passes: auto, bfloat16, float32, ...")
    parser.add_argument("--work", type=Path, help="folder for the model; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        return _run(options, Path(work), console)


def write_inputs(work: Path, shape: str, layers: int | None, samples: int, length: int) -> tuple[int, dict[str, Any]]:
    """Writes model and calibration text into `work`; returns the number of weights, and versions and hardware."""
    from benchmarking.machine import environment
    from benchmarking.models import SHAPES, write_calibration, write_model

    write_calibration(work / "calibration.jsonl", samples * length)
    chosen = SHAPES[shape] if layers is None else replace(SHAPES[shape], layers=layers)
    return write_model(work / "model", chosen), environment()


def _run(options: argparse.Namespace, work: Path, console: Console) -> int:
    parameters, facts = in_own_process(
        write_inputs, work, options.shape, options.layers, options.num_calibration_samples, options.max_seq_length
    )
    layers = f" cut to {options.layers} layers" if options.layers else ""
    facts |= {
        "shape": f"{options.shape}{layers} ({parameters / 1e9:.3f}e9 random weights, bfloat16)",
        "calibration": f"{options.num_calibration_samples} x {options.max_seq_length} tokens",
        "scheme": str(Int(options.bits, group_size_from(options.group_size))),
    }
    console.print(describe(facts))
    calibration = CalibrationOptions(
        str(work / "calibration.jsonl"), options.num_calibration_samples, options.max_seq_length
    )
    scheme = Int(options.bits, group_size_from(options.group_size))
    setup = Setup(work / "model", calibration, scheme, options.device, options.dtype)
    rows = [in_own_process(measure_dense_pass, setup)]
    console.print(f"  {rows[0].name}: {rows[0].seconds:.1f} s")
    for method in options.methods:
        rows.append(in_own_process(measure_method, setup, method))
        console.print(f"  {method}: {rows[-1].seconds:.1f} s, {rows[-1].seconds / rows[0].seconds:.2f} x dense forward")
    print_table("One process for each row", table_rows(rows, parameters), console)
    if options.json:
        write_json(options.json, {"facts": facts, "parameters": parameters, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    leave_with(main)

"""Whole models on one GPU: this engine dense, int8, int4 and with int4 keys and values, beside transformers.

Random weights of a real shape, the same for all. Each contender runs in a process of its own, one after the other: time
to the first token, decode at several batches (with the share of the card's measured read stream that its bytes are),
prefill, requests of mixed lengths, and peak memory. With --device cpu and a small shape it runs without a GPU: to see
that it works, not for its figures.

    python scripts/bench_gpu.py --shape 8b --json gpu.json --markdown gpu.md
    python scripts/bench_gpu.py --shape demo --device cpu --short
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarking.entry import leave_with
from benchmarking.gpu_contenders import CONTENDERS
from benchmarking.gpu_measure import Figures, Work, measure
from benchmarking.memory import in_own_process
from benchmarking.tables import Row, describe, markdown_table, print_with_markdown, write_json
from benchmarking.workload import mixed_jobs
from rich.console import Console

SHAPE_NAMES = ("demo", "tiny", "125m", "1.1b", "8b", "14b")
UNKNOWN = "-"


def prepare(work: Path, shape: str, device: str) -> dict[str, Path]:
    """The model dense, and packed by rounding: 8 bits, and 4 bits with an 8-bit head."""
    from benchmarking.compression import compress
    from benchmarking.random_model import SHAPES, write_model

    from compress.checkpoint.scheme import Scheme
    from compress.common.cli import demo_model_path
    from compress.recipe import HEAD_TARGET, CalibrationOptions, QuantizeStage

    dense = demo_model_path()
    if shape != "demo":
        dense = work / "dense"
        write_model(dense, SHAPES[shape], device=device)
    folders = {"dense": dense}
    head = [QuantizeStage("rtn", Scheme(8, 64), targets=(HEAD_TARGET,))] if shape != "demo" else []
    for name, scheme in (("int8", Scheme(8, None)), ("int4", Scheme(4, 64 if shape == "demo" else 128))):
        folders[name] = compress(
            dense, work / name, [QuantizeStage("rtn", scheme), *head], CalibrationOptions(), device=device
        ).out
    return folders


def stream_of(device: str) -> float | None:
    """The measured read stream of a GPU in bytes per second; None on a CPU."""
    if device == "cpu":
        return None
    from benchmarking.gpu_timing import read_stream, require_gpu

    return read_stream(require_gpu())


def table(figures: Sequence[Figures], batches: Sequence[int], stream: float | None) -> list[Row]:
    return [_row(each, batches, stream) for each in figures]


def _row(each: Figures, batches: Sequence[int], stream: float | None) -> Row:
    row = {"contender": each.name, "first token": _number(each.first_token, "{:.1f} s")}
    for batch in batches:
        seconds = each.decode.get(batch)
        row[f"decode {batch}"] = _number(seconds and batch / seconds, "{:.0f}")
        share = each.step_bytes[batch] / seconds / stream if seconds and stream else None
        row[f"stream {batch}"] = _number(share, "{:.0%}")
    row["prefill"] = _number(each.prefill, "{:.0f}")
    row["mixed"] = _number(each.mixed, "{:.0f}")
    row["peak GB"] = _number(each.peak_bytes / 1e9 or None, "{:.2f}")
    return row | {"note": each.error}


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def measured(name: str, folders: dict[str, Path], work: Work, device: str) -> Figures:
    """A contender that fails is a row that says why; the others go on."""
    try:
        return in_own_process(measure, name, folders, work, device)
    except Exception as error:  # whatever a contender raises is its finding
        return Figures(name, error=(str(error).splitlines() or [type(error).__name__])[0][:120])


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=SHAPE_NAMES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8, 64), help="sequences decoded together")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before a decode")
    parser.add_argument("--steps", type=int, default=64, help="of a decode")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--requests", type=int, default=128, help="of mixed lengths")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of such a prompt, and of its answer")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-memory", type=float, default=12, help="GB for the engine's keys and values on a GPU")
    parser.add_argument("--short", action="store_true", help="little of everything, to see whether it works")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    if options.short:
        options.batches, options.prompt, options.steps, options.prefill = (1, 4), 16, 8, 64
        options.requests, options.shortest, options.longest, options.rounds = 4, 4, 16, 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=200, highlight=False)
    from benchmarking.machine import environment

    stream = in_own_process(stream_of, options.device)
    facts = in_own_process(environment) | {"shape": options.shape, "read stream GB/s": stream and round(stream / 1e9)}
    console.print(describe(facts))
    with tempfile.TemporaryDirectory() as folder:
        folders = in_own_process(prepare, Path(folder), options.shape, options.device)
        jobs = mixed_jobs(folders["dense"], options.requests, options.shortest, options.longest)
        kv_bytes = None if options.device == "cpu" else round(options.kv_memory * 1e9)
        sizes = options.prompt, options.steps, options.prefill
        work = Work(tuple(options.batches), *sizes, tuple(jobs), options.rounds, kv_bytes)
        figures = [measured(name, folders, work, options.device) for name in options.contenders]
    rows = table(figures, options.batches, stream)
    title = f"{options.shape}: tokens/s of decode by batch, its share of the read stream, prefill and mixed requests"
    print_with_markdown(title, rows, console)
    if options.markdown:
        options.markdown.write_text(f"{describe(facts)}\n\n{markdown_table(rows)}", encoding="utf-8")
    if options.json:
        write_json(options.json, {"facts": facts, "figures": [asdict(each) for each in figures]})
    return 1 if all(each.error for each in figures) else 0


if __name__ == "__main__":
    leave_with(main)

"""Plans and results as tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from compress.assignment import Assignment
from compress.checkpoint.config import REPORT_FILE
from compress.cli.embedding_tip import embedding_tip
from compress.plan import Plan, by_kind

if TYPE_CHECKING:
    from compress.checkpoint.structure import StructureReport
    from compress.pipeline.prepare import Prepared
    from compress.pipeline.run import RunResult

_PLAIN_WIDTH = 120


def print_plan(prepared: Prepared) -> None:
    """What would happen to every tensor, grouped by kind, with totals and needs."""
    console = wide_console()
    table = Table(title=f"Plan for {prepared.request.model}", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("becomes")
    for column in ("MB before", "MB after"):
        table.add_column(column, justify="right", no_wrap=True)
    for (name, shape, assignment, reason), rows in by_kind(prepared.plan.rows).items():
        table.add_row(
            name.removesuffix(".weight"),
            " x ".join(map(str, shape)),
            str(len(rows)),
            _becomes(assignment, reason),
            megabytes(sum(row.bytes_before for row in rows)),
            megabytes(sum(row.bytes_after for row in rows)),
        )
    plan = prepared.plan
    table.add_section()
    table.add_row("total", "", "", "", megabytes(plan.bytes_before), megabytes(plan.bytes_after))
    console.print(table)
    for line in _facts(prepared):
        console.print(line, highlight=False, markup=False)


def _becomes(assignment: Assignment | None, reason: str) -> str:
    if assignment is None:
        return f"dense: {reason}"
    return f"{assignment} ({reason})" if reason else str(assignment)


def describe_run(prepared: Prepared) -> str:
    """Where the calibration comes from and how it runs, in one line."""
    if prepared.sequences is None:
        return "Calibration: none"
    count, length = prepared.sequences.tokens.shape
    dtype = str(prepared.dtype).removeprefix("torch.")
    return (
        f"Calibration: {prepared.sequences.source}, {count} sequences of {length} tokens, "
        f"{prepared.micro_batch} at a time, {dtype} on {prepared.device}"
    )


def print_result(prepared: Prepared, result: RunResult, with_tip: bool = True) -> None:
    """Sizes, verification, quality, and the next command to type; a tip only where its option exists."""
    console = wide_console()
    table = Table(show_header=False)
    for name, text in _rows(prepared, result, with_tip):
        table.add_row(name, text)
    console.print(table)
    warnings = [*result.quality.get("warnings", ()), *(result.kv_cache.warnings if result.kv_cache else ())]
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    console.print("Next:", highlight=False)
    for command in _next_commands(result.out):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _rows(prepared: Prepared, result: RunResult, with_tip: bool) -> Iterator[tuple[str, str]]:
    structure, before = result.structure, prepared.plan.bytes_before
    sizes = f"{megabytes(before)} MB -> {megabytes(structure.total_bytes)} MB"
    yield "size", f"{sizes} ({before / structure.total_bytes:.2f} times smaller)"
    if with_tip and (tip := embedding_tip(prepared.plan, structure.total_bytes)):
        yield "tip", tip
    yield "bits per weight", _bits(structure)
    verified = f"{len(structure.quantized)} layers read back bit for bit"
    yield "verified", f"{verified}, {len(structure.dense)} tensors kept dense"
    yield from _quality(result.quality)
    if peak := result.report["peak_device_bytes"]:
        yield "GPU memory", f"{gigabytes(peak)} GB at most"
    if result.kv_cache is not None:
        yield "KV cache", result.kv_cache.describe()
    if recovered := result.report["recovered"]:
        yield "fallbacks", "; ".join(f"{each['module']}: {each['recovery']}" for each in recovered[:3])
    yield "report", str(result.out / REPORT_FILE)


def _bits(counted: Plan | StructureReport) -> str:
    layers, model = f"{counted.bits_per_weight:.3f}", f"{counted.bits_per_parameter:.3f}"
    return f"{layers} in the quantized layers, {model} over the whole model"


def _facts(prepared: Prepared) -> list[str]:
    plan = prepared.plan
    lines = [
        f"bits per weight: {_bits(plan)}",
        f"peak memory: about {gigabytes(prepared.peak_memory)} GB; "
        f"disk while running: about {gigabytes(prepared.disk)} GB beside {prepared.request.out}",
    ]
    return [*lines, describe_run(prepared), *(f"note: {note}" for note in prepared.notes)]


def _quality(quality: dict) -> list[tuple[str, str]]:
    if "not_measured" in quality:
        return [("quality", f"not measured: {quality['not_measured']}")]
    return [
        (
            "perplexity",
            f"{quality['baseline_perplexity']:.3f} dense -> {quality['perplexity']:.3f} packed "
            f"({quality['tokens']} tokens of {quality['data']}: a quick check)",
        ),
        ("KL to dense", f"{quality['kl_mean']:.5f} mean, {quality['kl_p999']:.4f} at 99.9 %"),
    ]


def _next_commands(out: Path) -> list[str]:
    folder = shlex.quote(f"{out}/")
    return [f"compress eval --ppl {folder}", f"runtime serve {folder}"]


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f}"


def wide_console() -> Console:
    """A terminal keeps its width; a file or a pipe gets room for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)

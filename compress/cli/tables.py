"""Tables of plans and results."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from compress.checkpoint.activations import ACTIVATIONS_MEASURED_KEY, SIXTEEN_BITS, MeasuredActivations
from compress.checkpoint.locate import shown_name
from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.checkpoint.weights import Int, Scheme
from compress.common.cli import wide_console
from compress.common.evaluation import Evaluation, findings_of
from compress.common.files import REPORT_FILE, size
from compress.plan import LayerPlan, Plan, by_kind
from compress.reporting.page import times
from compress.stages.quantize import EMBEDDING_TARGET
from compress.targets import without_indices

if TYPE_CHECKING:
    from compress.checkpoint.verify import StructureReport
    from compress.evaluate.layers import LayerError
    from compress.evaluate.server import Server
    from compress.evaluate.session import EvaluationReport
    from compress.pipeline.prepare import RunContext
    from compress.pipeline.run import RunResult
    from compress.search.allocate import Choice, Try
    from compress.search.space import LayerGroup
    from compress.search.survey import Survey


_LEAST_SAVING = 0.1
"""Smallest share of the file that must be saved for a tip to be printed."""
_SCHEME = Int(8, None)


def embedding_tip(plan: Plan, total_bytes: int) -> str:
    """Returns a line about the savings of a quantized embedding; empty if they are small. `total_bytes`: size of the
    weights as written."""
    saved = sum(
        row.bytes_before - _SCHEME.stored_bits(row.shape[0], row.shape[1]) // 8
        for row in plan.rows
        if row.layer_plan is None and row.tensor.endswith(f".{EMBEDDING_TARGET}.weight")
    )
    if saved < _LEAST_SAVING * total_bytes:
        return ""
    then = total_bytes - saved
    return f"--embedding-bits 8 makes it {size(then)} ({times(plan.bytes_before, then)}), for this runtime only"


def print_plan(context: RunContext) -> None:
    """Prints the plan of every tensor, grouped by kind, with totals, memory and disk space."""
    console = wide_console()
    table = Table(title=f"Plan for {shown_name(context.request.model)}", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("becomes")
    for column in ("MB before", "MB after"):
        table.add_column(column, justify="right", no_wrap=True)
    for (name, shape, layer_plan, reason, kept), rows in by_kind(context.plan.rows).items():
        table.add_row(
            name.removesuffix(".weight"),
            " x ".join(map(str, shape)),
            str(len(rows)),
            _becomes(layer_plan, reason, kept),
            megabytes(sum(row.bytes_before for row in rows)),
            megabytes(sum(row.bytes_after for row in rows)),
        )
    plan = context.plan
    table.add_section()
    if plan.removed_bytes:
        table.add_row("removed", "", "", "", megabytes(plan.removed_bytes), megabytes(0))
    table.add_row("total", "", "", "", megabytes(plan.bytes_before), megabytes(plan.bytes_after))
    console.print(table)
    console.print("\n".join(_facts(context)), highlight=False, markup=False)


def _becomes(layer_plan: LayerPlan | None, reason: str, kept: Scheme | None) -> str:
    if layer_plan is None:
        return f"{f'keeps {kept}' if kept else 'dense'}: {reason}"
    return f"{layer_plan} ({reason})" if reason else str(layer_plan)


def describe_run(context: RunContext) -> str:
    """Returns source, size and device of the calibration in one line."""
    if context.sequences is None:
        return "Calibration: none"
    count, length = context.sequences.tokens.shape
    dtype = str(context.dtype).removeprefix("torch.")
    return (
        f"Calibration: {context.sequences.source}, {count} sequences of {length} tokens, "
        f"{context.micro_batch} at a time, {dtype} on {context.workers}"
    )


def print_result(context: RunContext, result: RunResult, with_tip: bool = True) -> None:
    """Prints sizes, verification, quality and the next commands; with a tip if the command has the option for it."""
    from compress.evaluate.scorers import default_backend

    console = wide_console()
    table = Table(show_header=False)
    for name, text in _rows(context, result, with_tip):
        table.add_row(name, text)
    console.print(table)
    warnings = [*result.quality.get("warnings", ()), *(result.kv_cache.warnings if result.kv_cache else ())]
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    console.print(
        "Next:" if context.has_tokenizer else "Next (without a tokenizer the model cannot be served):", highlight=False
    )
    for command in _next_commands(result.out, context.has_tokenizer, default_backend(result.out)):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _rows(context: RunContext, result: RunResult, with_tip: bool) -> Iterator[tuple[str, str]]:
    structure, before = result.structure, context.plan.bytes_before
    sizes = f"{megabytes(before)} MB -> {megabytes(structure.total_bytes)} MB"
    yield "size", f"{sizes} ({before / structure.total_bytes:.2f} times smaller)"
    if with_tip and (tip := embedding_tip(context.plan, structure.total_bytes)):
        yield "tip", tip
    yield "bits per weight", _bits(structure)
    verified = f"{len(structure.quantized)} layers read back bit for bit"
    yield "verified", f"{verified}, {len(structure.dense)} tensors kept dense"
    yield from _quality(result.quality)
    yield from findings_of(result.report)
    if peak := result.report["peak_device_bytes"]:
        yield "GPU memory", f"{gigabytes(peak)} GB at most"
    if result.kv_cache is not None:
        yield "KV cache", result.kv_cache.describe()
    if result.mtp is not None:
        yield "drafting head", result.mtp.describe()
    if recovered := result.report["recovered"]:
        yield "fallbacks", "; ".join(f"{each['module']}: {each['recovery']}" for each in recovered[:3])
    yield "report", str(result.out / REPORT_FILE)


def _bits(counted: Plan | StructureReport) -> str:
    layers, model = f"{counted.bits_per_weight:.3f}", f"{counted.bits_per_parameter:.3f}"
    return f"{layers} in the quantized layers, {model} over the whole model"


def _facts(context: RunContext) -> list[str]:
    from compress.pipeline.quality import plan_quality

    plan = context.plan
    of_it = f", {gigabytes(context.peak.device)} GB of it on each GPU" if context.device.type == "cuda" else ""
    lines = [
        f"bits per weight: {_bits(plan)}",
        f"peak memory: about {gigabytes(context.peak_memory)} GB{of_it}; "
        f"disk while running: about {gigabytes(context.disk)} GB next to {context.request.out}",
        plan_quality(context).describe(),
    ]
    return [*lines, describe_run(context), *(f"note: {note}" for note in context.notes)]


def _quality(quality: dict[str, Any]) -> list[tuple[str, str]]:
    if "not_measured" in quality:
        return [("quality", f"not measured: {quality['not_measured']}")]
    return [
        (
            "perplexity",
            f"{quality['baseline_perplexity']:.3f} dense -> {quality['perplexity']:.3f} packed "
            f"({quality['tokens']} tokens of {quality['data']}: a quick check)",
        ),
        *Evaluation.from_dict(quality).comparison(),
        *_activations(quality),
    ]


def _activations(quality: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the measured forms of activations, where there were two."""
    measured = quality[ACTIVATIONS_MEASURED_KEY]
    if measured is None:
        return []
    return [("activations", f"{quality['activations']} on CPUs: {MeasuredActivations(**measured)}")]


def _next_commands(out: Path, has_tokenizer: bool, backend: str) -> list[str]:
    folder = shlex.quote(f"{out}/")
    if not has_tokenizer:
        return [f"compress verify {folder}"]
    if backend != "runtime":
        return [f"compress eval --ppl --backend {backend} {folder}"]
    return [f"compress eval --ppl {folder}", f"runtime serve {folder}", f"hf upload ORG/NAME {folder}"]


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f}"


def print_evaluation(report: EvaluationReport, more: Iterable[tuple[str, str]] = ()) -> None:
    """Prints the result, `more` rows, its protocol, text and baseline."""
    result = report.result
    table = Table(title=f"Evaluation of {_side(report.request.model)}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("perplexity", f"{result.perplexity:.4f}")
    if result.baseline_perplexity is not None:
        change = 100 * (result.perplexity / result.baseline_perplexity - 1)
        table.add_row("baseline perplexity", f"{result.baseline_perplexity:.4f}")
        table.add_row("change", f"{change:+.2f} %")
    for name, text in result.comparison():
        table.add_row(name, text)
    for name, text in more:
        table.add_row(name, text)
    if report.request.activations != SIXTEEN_BITS:
        table.add_row("activations", report.request.activations)
    if not report.request.kv_cache.is_exact:
        table.add_row("KV cache", str(report.request.kv_cache))
    if report.request.state_dtype != STATE_FLOAT32:
        table.add_row("recurrent states", report.request.state_dtype)
    table.add_row("predicted tokens", f"{result.tokens:,}")
    console = Console()
    console.print(table)
    console.print(f"Protocol: {report.windows.protocol}; text sha256 {report.windows.sha256[:12]}", highlight=False)
    if report.baseline is not None:
        console.print(f"Baseline: {_side(report.baseline)}", highlight=False)


def _side(source: Path | Server) -> str:
    return shown_name(source) if isinstance(source, Path) else str(source)


def print_layer_errors(layers: Sequence[LayerError]) -> None:
    """Prints the relative error of hidden states after each block."""
    table = Table("after", "relative error", title="Hidden states", title_justify="left")
    for each in layers:
        error = "" if each.standard_error is None else f" ± {each.standard_error:.2g}"
        table.add_row(each.block, f"{each.relative_error:.4g}{error}")
    Console().print(table)


def print_survey(survey: Survey) -> None:
    """Prints the measurements of a search, its time and its memory."""
    table = Table(title=f"Search on {shown_name(survey.context.request.model)}", title_justify="left")
    table.add_column("decided together", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("may become (MB each)", overflow="fold")
    kinds: dict[tuple[str, ...], list[LayerGroup]] = {}
    for group in survey.candidates:
        kinds.setdefault(tuple(map(without_indices, group.modules)), []).append(group)
    for modules, groups in kinds.items():
        sizes = [
            f"{candidate} {megabytes(survey.cost(groups[0], candidate))}" for candidate in survey.candidates[groups[0]]
        ]
        table.add_row("\n".join(modules), str(len(groups)), ", ".join(sizes))
    console = wide_console()
    console.print(table)
    console.print("\n".join(describe_survey(survey)), highlight=False, markup=False)


def describe_survey(survey: Survey) -> list[str]:
    """Returns target, range of sizes, time, memory and notes, one line each."""
    low, high = survey.smallest, survey.largest
    return [
        f"target: {survey.request.goal}; candidates reach {survey.bits_per_weight(low):.3f} to "
        f"{survey.bits_per_weight(high):.3f} bits per weight, {megabytes(low + survey.fixed_bytes)} to "
        f"{megabytes(high + survey.fixed_bytes)} MB",
        f"{survey.measurements} measurements over {survey.measured.numel():,} tokens, "
        f"{survey.operations / 1e12:,.1f} TFLOP: about {survey.seconds():,.0f} s at the speed of this device, plus "
        "the time of rounding",
        f"peak memory: about {gigabytes(survey.peak_memory)} GB with the whole model in it",
        describe_run(survey.context),
        *(f"note: {note}" for note in survey.context.notes),
    ]


def print_choice(survey: Survey, choice: Choice, tries: Sequence[Try], recipe: Path) -> None:
    """Prints how often each candidate was chosen, by kind of layer."""
    words = list(map(str, survey.request.candidates))
    table = Table(title=f"Found for {survey.request.goal}", title_justify="left")
    table.add_column("decided together", overflow="fold")
    for each in words:
        table.add_column(each, justify="right")
    kinds: dict[str, Counter[str]] = {}
    for group, candidate in choice.candidates.items():
        kinds.setdefault("\n".join(map(without_indices, group.modules)), Counter())[str(candidate)] += 1
    for modules, counts in kinds.items():
        table.add_row(modules, *(str(counts[each] or "") for each in words))
    console = wide_console()
    console.print(table)
    lines = [f"sensitivities add up to KL {choice.predicted:.4f}"]
    lines += [
        f"try {number}: predicted {each.predicted:.4f}, measured {each.measured:.4f}, {megabytes(each.bytes)} MB"
        for number, each in enumerate(tries, 1)
    ]
    console.print("\n".join([*lines, f"recipe: {recipe}"]), highlight=False, markup=False)

"""Commands that read checkpoints: verify, eval, export, report, compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.activations import SIXTEEN_BITS
from compress.checkpoint.config import read_config
from compress.checkpoint.locate import find_model, shown_name
from compress.cli.options import (
    DEFAULT_OUT,
    AsJson,
    KernelsMode,
    KVCacheOptions,
    ScoreOptions,
    StateOptions,
    StreamOptions,
)
from compress.common.cli import DEMO_NAME, demo_model_path, with_groups
from compress.common.errors import RecipeError, ToolkitError
from compress.common.files import in_home

if TYPE_CHECKING:
    from rich.console import Console

    from compress.checkpoint.verify import StructureReport
    from compress.evaluate.streamed import Report
    from compress.reporting.comparison import Comparison


def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, packed by this or another tool.")],
    as_json: AsJson = False,
) -> None:
    """Read a checkpoint again and check config, names, shapes, codes and scales.

    If the folder has a compression report, codes are compared with it bit for bit.
    """
    from compress.checkpoint.gguf.folder import folder_of
    from compress.checkpoint.verify import verify_structure
    from compress.common.errors import CheckpointError
    from compress.pipeline.finish import compare_with_report

    folder = folder_of(path)
    kv_cache, structure = _kv_cache(folder), replace(verify_structure(folder), path=shown_name(path))
    differing = compare_with_report(folder)
    problems = [*structure.problems, *(differing or ())]
    if as_json:
        typer.echo(json.dumps(structure.as_dict() | {"problems": problems, "ok": not problems}, indent=2))
    else:
        _print(structure, kv_cache, compared=differing is not None)
        for problem in problems:
            typer.echo(f"problem: {problem}")
    if problems:
        raise CheckpointError(f"{path} has {len(problems)} problems", "Write or download it again")


def _kv_cache(path: Path) -> list[str]:
    """Returns a line about the recorded KV cache format, if there is one."""
    from compress.checkpoint.config import read_config
    from compress.checkpoint.kv_cache import stored_kv_cache
    from compress.common.errors import ToolkitError

    try:
        scheme = stored_kv_cache(read_config(path))
    except ToolkitError:
        # Verification reports it as a problem.
        return []
    return [f"the KV cache is served as {scheme} by default"] if scheme else []


def _print(structure: StructureReport, kv_cache: list[str], compared: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from compress.targets import without_indices

    kinds: dict[tuple[str, str], int] = {}
    for module, scheme in structure.quantized.items():
        kinds[without_indices(module), scheme] = kinds.get((without_indices(module), scheme), 0) + 1
    for tensor in structure.dense:
        kind = (without_indices(tensor.name), f"dense: {tensor.reason}")
        kinds[kind] = kinds.get(kind, 0) + 1
    table = Table(
        "tensor",
        "stored as",
        "count",
        title=f"{structure.path} ({structure.format})",
        title_justify="left",
    )
    for (name, stored), count in sorted(kinds.items()):
        table.add_row(name, stored, str(count))
    console = Console()
    console.print(table)
    lines = [
        f"{structure.total_bytes / 1e6:,.2f} MB, {structure.bits_per_weight:.3f} bits per quantized weight, "
        f"{structure.bits_per_parameter:.3f} over the whole model",
        *kv_cache,
        "codes compared with the compression report" if compared else "no compression report to compare the codes with",
        *structure.notes,
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


@with_groups
def evaluate(
    *,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint to measure. Default: packed/ if it exists, else the demo model."
        ),
    ] = None,
    ppl: Annotated[bool, typer.Option("--ppl", help="Measure perplexity, and KL to the baseline.")] = False,
    score: ScoreOptions,
    kv: KVCacheOptions,
    states: StateOptions,
    stream: StreamOptions,
    kernels: KernelsMode = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure perplexity and KL by the standard protocol.

    The text is split into non-overlapping windows; every token of a window except the first is predicted. Scores come
    from the runtime's model and kernels, as in `runtime serve`.
    """
    from rich.console import Console

    from compress.checkpoint.gguf.folder import folder_of
    from compress.cli.tables import print_evaluation
    from compress.evaluate.session import plan_evaluation, record_states, run_evaluation

    states.check()
    if not ppl:
        raise ToolkitError("no measurement was requested", "Add --ppl")
    console = Console(stderr=True)
    path = folder_of(model, code=score.trust_remote_code) if model else _default_model(console)
    streaming = stream.streaming(path)
    request = score.request(path, kv.scheme(read_config(path)), kernels, states.state_dtype, streaming)
    request = replace(request, baseline=path, activations=SIXTEEN_BITS) if states.record else request
    if stream.dry_run:
        plan = plan_evaluation(request)
        typer.echo(json.dumps(plan.to_dict(), indent=2) if as_json else plan.describe())
        return
    try:
        with _progress(console, streaming is not None) as on_progress:
            report = run_evaluation(request, on_progress)
    except KeyboardInterrupt:
        if streaming is not None and streaming.folder.exists():
            console.print(
                f"\nInterrupted. Hidden states are in {streaming.folder}: run the same command again to continue."
            )
        raise
    if states.record:
        console.print(f"recorded: {record_states(report)}", highlight=False, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_evaluation(report)


def _default_model(console: Console) -> Path:
    if DEFAULT_OUT.is_dir():
        console.print(f"No model named: measuring {DEFAULT_OUT}/", highlight=False, soft_wrap=True)
        return DEFAULT_OUT
    console.print(
        f"No model named and no {DEFAULT_OUT}/ here: measuring the {DEMO_NAME}", highlight=False, soft_wrap=True
    )
    return demo_model_path()


@contextmanager
def _progress(console: Console, with_lines: bool) -> Iterator[Report]:
    """Shows a progress bar on a terminal; elsewhere prints a line per layer, if requested."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, last = progress.add_task("scoring", total=None), ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal last
            progress.update(task, description=what, completed=done, total=total)
            if with_lines and not console.is_terminal and what != last:
                console.print(what, highlight=False)
            last = what

        yield report


def export(
    path: Annotated[Path, typer.Argument(help="A packed checkpoint folder; for gguf also a dense one.")],
    format: Annotated[
        str | None,
        typer.Option(help="compressed-tensors, compress-runtime, gptq, awq, fp8, dense, or gguf.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write, or file for gguf; must not exist.", show_default=False)
    ] = None,
    gguf_type: Annotated[
        str | None,
        typer.Option(help="GGUF type for dense matrices and for codes that no GGUF type holds: q4_k, ..."),
    ] = None,
    list_formats: Annotated[
        bool,
        typer.Option("--list", help="List the formats that can hold it and the engines that load them; write nothing."),
    ] = False,
) -> None:
    """Convert a packed checkpoint to another format without loss; fails with the reason if that is impossible."""
    from compress.checkpoint.containers import containers
    from compress.checkpoint.gguf.folder import folder_of
    from compress.checkpoint.reader import PackedCheckpoint
    from compress.checkpoint.writer import export_checkpoint
    from compress.common.files import REPORT_FILE
    from compress.reporting.model_card import write_card
    from compress.reporting.report_data import read_report

    if list_formats:
        for each in containers(folder_of(path)):
            loaded = f"loaded by {', '.join(each.readers)}" if each.readers else f"cannot hold it: {each.refusal}"
            typer.echo(f"{each.format}: {loaded}")
        return
    if format is None or out is None:
        raise RecipeError("an export needs a format and a folder", "Add --format dense --out FOLDER, or --list")
    if format == "gguf":
        from compress.checkpoint.gguf.export import export_gguf

        exported = export_gguf(folder_of(path), out, gguf_type)
        typer.echo("\n".join([*exported.lines(), f"wrote {exported.path} ({format})"]))
        return
    if gguf_type is not None:
        raise ToolkitError(f"--gguf-type {gguf_type} does not apply to {format}", "Add --format gguf")
    source = folder_of(path)
    if (source / REPORT_FILE).is_file():
        read_report(source)  # its figures go into the card: a damaged report is refused before anything is written
    written = export_checkpoint(source, format, out)
    write_card(written, source)
    if inputs := PackedCheckpoint.open(source).describe_inputs():
        typer.echo(f"inputs keep 16 bits in the copy, where {shown_name(source)} rounds them: {inputs}")
    typer.echo(f"wrote {written} ({format})")


def report(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint folder that this toolkit wrote.")],
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write an HTML report of a run: sizes, memory, quality, errors by depth, bits, smoothing, notes.

    The page is self-contained and has no scripts.
    """
    from compress.reporting.report_data import read_headers, read_report
    from compress.reporting.report_page import report_page

    found = read_report(find_model(path, weights=False))
    report_page(found, read_headers(found)).write(in_home(out))
    typer.echo(f"Wrote {out}")


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Checkpoint folders that this toolkit wrote.")],
    by: Annotated[str, typer.Option(help="size (of the files) or bits (per parameter of the whole model).")] = "size",
    measure: Annotated[str, typer.Option(help="kl (to the dense model) or ppl (perplexity).")] = "kl",
    out: Annotated[Path | None, typer.Option("--out", help="Also write an HTML page with the plot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare checkpoints of one source by their reports, and mark dominated ones.

    Fails for reports with different sources, texts or protocols, because their figures are not comparable.
    """
    from compress.reporting.comparison import compare as compare_reports
    from compress.reporting.comparison import compare_page
    from compress.reporting.report_data import read_report

    comparison = compare_reports([read_report(find_model(path, weights=False)) for path in paths], by, measure)
    if out is not None:
        compare_page(comparison).write(in_home(out))
    if as_json:
        typer.echo(json.dumps(asdict(comparison), indent=2))
    else:
        _print_comparison(comparison, out)


def _print_comparison(comparison: Comparison, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from compress.reporting.comparison import HEAD, NUMERIC, table_rows

    table = Table(title=Text(f"Checkpoints of {comparison.source}"), title_justify="left")
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="right" if index in NUMERIC else "left", overflow="fold")
    for row in table_rows(comparison):
        table.add_row(*map(Text, row))
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    console.print(table)
    console.print(Text(f"Protocol: {comparison.protocol}"))
    if out is not None:
        console.print(Text(f"Wrote {out}"))

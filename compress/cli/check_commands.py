"""Commands that read checkpoints: verify, eval, compare-logits, report, compare."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.activations import AS_STORED, SIXTEEN_BITS
from compress.checkpoint.config import read_config
from compress.checkpoint.kv_cache import AUTO
from compress.checkpoint.locate import find_model, shown_name
from compress.cli.compress_commands import refuse_broken
from compress.cli.options import (
    DEFAULT_OUT,
    AsJson,
    Gate,
    KernelsMode,
    KVCacheOptions,
    ScoreOptions,
    StateOptions,
    StreamOptions,
)
from compress.common.cli import DEMO_NAME, demo_model_path, progress_bar, with_groups
from compress.common.errors import CheckpointError, ToolkitError
from compress.common.evaluation import MEASURED_KEY, findings_of
from compress.common.files import in_home
from compress.evaluate.gate import measured_for, parse_gate, verdicts

if TYPE_CHECKING:
    from rich.console import Console

    from compress.checkpoint.verify import StructureReport
    from compress.evaluate.layers import LayerError
    from compress.evaluate.session import EvaluationReport, EvaluationRequest
    from compress.evaluate.streamed import Report
    from compress.reporting.comparison import Comparison


def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, packed by this or another tool.")],
    receipt: Annotated[
        bool,
        typer.Option("--receipt", help="Also compare its files, and the dense model's, with its receipt."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read a checkpoint again and check config, names, shapes, codes and scales.

    If the folder has a compression report, codes are compared with it bit for bit.
    """
    from compress.checkpoint.gguf.folder import folder_of
    from compress.checkpoint.verify import verify_structure
    from compress.pipeline.finish import compare_with_report

    folder = folder_of(path)
    kv_cache, structure = _kv_cache(folder), replace(verify_structure(folder), path=shown_name(path))
    differing = compare_with_report(folder)
    problems = [*structure.problems, *(differing or ()), *(_receipt_problems(folder) if receipt else ())]
    if as_json:
        typer.echo(json.dumps(structure.as_dict() | {"problems": problems, "ok": not problems}, indent=2))
    else:
        _print(structure, kv_cache, compared=differing is not None)
        for problem in problems:
            typer.echo(f"problem: {problem}")
    if problems:
        raise CheckpointError(f"{path} has {len(problems)} problems", "Write or download it again")


def _receipt_problems(folder: Path) -> Iterator[str]:
    """Yields differences of a checkpoint, and of the dense model where it still is, from the receipt."""
    from compress.evaluate.session import recorded_source
    from compress.pipeline.receipt import changed_files, read_receipt

    recorded = read_receipt(folder)
    yield from changed_files(recorded["outputs"], folder)
    source = recorded_source(read_config(folder))
    if source is not None and source.exists():
        yield from changed_files(recorded["source"]["files"], source)


def _kv_cache(path: Path) -> list[str]:
    """Returns a line about the recorded KV cache format, if there is one."""
    from compress.checkpoint.kv_cache import stored_kv_cache

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

    kinds = Counter((without_indices(module), scheme) for module, scheme in structure.quantized.items())
    kinds.update((without_indices(tensor.name), f"dense: {tensor.reason}") for tensor in structure.dense)
    title = f"{structure.path} ({structure.format})"
    table = Table("tensor", "stored as", "count", title=title, title_justify="left")
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
    baseline: Annotated[
        Path | None,
        typer.Option(help="Dense model to compare with. Default: the source recorded in the checkpoint."),
    ] = None,
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
    from compress.evaluate.session import record_states

    states.check()
    if not ppl:
        raise ToolkitError("no measurement was requested", "Add --ppl")
    console = Console(stderr=True)
    path = folder_of(model, code=score.trust_remote_code) if model else _default_model(console)
    streaming = stream.streaming(path)
    dense = folder_of(baseline, code=score.trust_remote_code) if baseline else None
    request = score.request(
        path,
        dense,
        kv_cache=kv.scheme(read_config(path)),
        kernels=kernels,
        state_dtype=states.state_dtype,
        streaming=streaming,
    )
    request = replace(request, baseline=path, activations=SIXTEEN_BITS) if states.record else request
    found = _run(request, console, stream.dry_run, as_json)
    if found is None:
        return
    if states.record:
        console.print(f"recorded: {record_states(found)}", highlight=False, soft_wrap=True)
    _show(found, console, as_json)


def _run(request: EvaluationRequest, console: Console, dry_run: bool, as_json: bool) -> EvaluationReport | None:
    """Evaluates with a progress bar; None for a dry run, whose plan is printed."""
    from compress.evaluate.session import plan_evaluation, run_evaluation

    if dry_run:
        plan = plan_evaluation(request)
        typer.echo(json.dumps(plan.to_dict(), indent=2) if as_json else plan.describe())
        return None
    streaming = request.streaming
    try:
        with _progress(console, streaming is not None) as on_progress:
            return run_evaluation(request, on_progress)
    except KeyboardInterrupt:
        if streaming is not None and streaming.folder.exists():
            console.print(
                f"\nInterrupted. Hidden states are in {streaming.folder}: run the same command again to continue."
            )
        raise


def _show(
    found: EvaluationReport,
    console: Console,
    as_json: bool,
    layers: Sequence[LayerError] = (),
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Prints warnings, and figures as tables or JSON."""
    from compress.cli.tables import print_evaluation, print_layer_errors

    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    if as_json:
        added: dict[str, Any] = {"layers": [asdict(each) for each in layers]} if layers else {}
        added |= {MEASURED_KEY: figures} if figures else {}
        typer.echo(json.dumps(found.to_dict() | added, indent=2))
        return
    print_evaluation(found, findings_of({MEASURED_KEY: figures}))
    if layers:
        print_layer_errors(layers)


_SIDE = "a folder, a GGUF file, a name of the hub, or the address of a running server (http://HOST:PORT)."


@with_groups
def compare_logits(
    *,
    reference: Annotated[str, typer.Argument(metavar="A", help=f"Reference: {_SIDE}")],
    model: Annotated[str, typer.Argument(metavar="B", help=f"Model that is judged: {_SIDE}")],
    score: ScoreOptions,
    stream: StreamOptions,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Also compare the hidden states after each block, of two folders.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer of two servers. Default: that of B, or of A.")
    ] = None,
    gate: Gate = "",
    as_json: AsJson = False,
) -> None:
    """Compare the distributions of the next token of any two models.

    KL(A || B), the acceptance of speculative sampling, and flips of the most likely token, with standard errors over
    windows of text. Of a server the most likely tokens are known; KL is then a lower bound.
    """
    from rich.console import Console

    from compress.checkpoint.gguf.folder import folder_of
    from compress.evaluate.layers import layer_errors
    from compress.evaluate.server import Server

    limits = parse_gate(gate)
    first, second = (Server.parse(each) or folder_of(each, code=score.trust_remote_code) for each in (reference, model))
    request = score.request(
        second,
        first,
        activations=AS_STORED if score.activations == AUTO else score.activations,
        streaming=stream.streaming(second if isinstance(second, Path) else Path("server")),
        tokenizer=folder_of(tokenizer, weights=False) if tokenizer else None,
    )
    if by_layer and request.servers:
        raise ToolkitError(f"{request.servers[0]} has no hidden states", "Leave --by-layer out, or name two folders")
    if (asked := measured_for(limits)) and request.servers:
        problem = f"{asked[0]} is measured on the files of a model, and {request.servers[0]} is a server"
        raise ToolkitError(problem, "Name two folders, or leave it out of --gate")
    console = Console(stderr=True)
    found = _run(request, console, stream.dry_run, as_json)
    if found is None:
        return
    layers: list[LayerError] = []
    if by_layer:
        judged, exact = request.folders[:2]
        layers = layer_errors(exact, judged, found.windows.tokens, request.options | {"kernels": AS_STORED})
    figures = _figures(request, asked, console)
    _show(found, console, as_json, layers, figures)
    report = {"quality": found.to_dict(), MEASURED_KEY: figures, "blocks": ()}
    refuse_broken(list(verdicts(limits, report)), model, "Compress less, or use it as it is")


def _figures(request: EvaluationRequest, names: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """Measures the figures that a gate asks for; returns their findings by name."""
    if not names:
        return {}
    from compress.evaluate.side import measure_figures
    from compress.pipeline.answers import sides

    judged, exact = request.folders[:2]
    with _progress(console, False) as on_progress:
        found = measure_figures(names, *sides(exact, judged, request.trust_remote_code), on_progress)
    return {name: finding.to_dict() for name, finding in found.items()}


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
    with progress_bar(console, "scoring") as update:
        last = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal last
            update(what, done, total)
            if with_lines and not console.is_terminal and what != last:
                console.print(what, highlight=False)
            last = what

        yield report


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

"""`compress eval`: perplexity and divergence of a checkpoint, beside the model it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.demo import DEMO_NAME, demo_model_path
from compress.checkpoint.errors import ToolkitError
from compress.cli.options import DEFAULT_OUT, AsJson, Device

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from compress.evaluate.session import EvaluationReport


def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint to measure. Default: packed/ if it is there, else the demo model."
        ),
    ] = None,
    ppl: Annotated[bool, typer.Option("--ppl", help="Measure perplexity, and KL to the baseline.")] = False,
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="Text: pydoc (inside every Python), bundled, a .txt, .jsonl or .parquet file, or a datasets name.",
        ),
    ] = "pydoc",
    baseline: Annotated[
        Path | None, typer.Option(help="Dense model to compare with. Default: the source the checkpoint records.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens. Default: all the text.")] = None,
    backend: Annotated[
        str, typer.Option(help="runtime (what is served) or transformers (the cross-check).")
    ] = "runtime",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float32, ...")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure perplexity and KL by the standard protocol.

    The text is joined, cut into windows that do not overlap, and every token but the first of a window is predicted.
    The score comes from the runtime's own model, so what is measured is what `runtime serve` serves.
    """
    from rich.console import Console

    from compress.evaluate.session import EvaluationRequest, run_evaluation

    if not ppl:
        raise ToolkitError("nothing to measure was named", "Add --ppl")
    console = Console(stderr=True)
    path = model.expanduser() if model else _default_model(console)
    baseline = baseline.expanduser() if baseline else None
    request = EvaluationRequest(path, baseline, data, length, tokens, backend, device, dtype)
    with _progress(console) as progress:
        task = progress.add_task("scoring", total=None)
        report = run_evaluation(request, lambda done, total: progress.update(task, completed=done, total=total))
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print_table(report)


def _default_model(console: Console) -> Path:
    if DEFAULT_OUT.is_dir():
        console.print(f"No model named: measuring {DEFAULT_OUT}/", highlight=False, soft_wrap=True)
        return DEFAULT_OUT
    console.print(
        f"No model named and no {DEFAULT_OUT}/ here: measuring the {DEMO_NAME}", highlight=False, soft_wrap=True
    )
    return demo_model_path()


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_table(report: EvaluationReport) -> None:
    from rich.console import Console
    from rich.table import Table

    result = report.result
    table = Table(title=f"Evaluation of {report.request.model}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("perplexity", f"{result.perplexity:.4f}")
    if result.baseline_perplexity is not None:
        change = 100 * (result.perplexity / result.baseline_perplexity - 1)
        table.add_row("baseline perplexity", f"{result.baseline_perplexity:.4f}")
        table.add_row("change", f"{change:+.2f} %")
        table.add_row("KL mean (nats)", f"{result.kl_mean:.5f}")
        table.add_row("KL 99.9 % (nats)", f"{result.kl_p999:.4f}")
        table.add_row("same first token", f"{100 * result.top1_agreement:.2f} %")
    table.add_row("predicted tokens", f"{result.tokens:,}")
    console = Console()
    console.print(table)
    console.print(f"Protocol: {report.windows.protocol}; text sha256 {report.windows.sha256[:12]}", highlight=False)
    if report.baseline is not None:
        console.print(f"Baseline: {report.baseline}", highlight=False)

"""`compress eval`: perplexity and divergence of a checkpoint, beside the model it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.config import read_config
from compress.checkpoint.demo import DEMO_NAME, demo_model_path
from compress.checkpoint.errors import ToolkitError
from compress.checkpoint.kv_cache import AUTO, stored_kv_cache, wished_kv_cache
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
    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Read keys and values as a cache gives them back: 16bit, fp8, int8, k8v4 or int4; auto: as the "
            "checkpoint records, else 16bit. The baseline stays as it is.",
        ),
    ] = AUTO,
    kv_rotate: Annotated[
        bool | None, typer.Option("--kv-rotate/--no-kv-rotate", help="Default: for int4.", show_default=False)
    ] = None,
    kv_sinks: Annotated[int | None, typer.Option(min=0, help="First tokens that stay in 16 bits.")] = None,
    kv_recent: Annotated[int | None, typer.Option(min=0, help="Last tokens that stay in 16 bits.")] = None,
    kernels: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="How weights of the model are multiplied: auto; w4a8 (activations in 8 bits, on CPUs); reference. "
            "The baseline stays as it is.",
        ),
    ] = "auto",
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
    cache = wished_kv_cache(stored_kv_cache(read_config(path)), kv_cache, kv_rotate, kv_sinks, kv_recent)
    request = EvaluationRequest(path, baseline, data, length, tokens, backend, device, dtype, cache, kernels)
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
    if not report.request.kv_cache.is_exact:
        table.add_row("KV cache", str(report.request.kv_cache))
    table.add_row("predicted tokens", f"{result.tokens:,}")
    console = Console()
    console.print(table)
    console.print(f"Protocol: {report.windows.protocol}; text sha256 {report.windows.sha256[:12]}", highlight=False)
    if report.baseline is not None:
        console.print(f"Baseline: {report.baseline}", highlight=False)

"""`compress eval`: perplexity and divergence of a checkpoint, beside the model it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.config import read_config
from compress.checkpoint.demo import DEMO_NAME, demo_model_path
from compress.checkpoint.errors import ToolkitError
from compress.checkpoint.option_groups import with_groups
from compress.cli.eval_options import KernelsMode, KVCacheOptions, ScoreOptions
from compress.cli.options import DEFAULT_OUT, AsJson

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@with_groups
def evaluate(
    *,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint to measure. Default: packed/ if it is there, else the demo model."
        ),
    ] = None,
    ppl: Annotated[bool, typer.Option("--ppl", help="Measure perplexity, and KL to the baseline.")] = False,
    score: ScoreOptions,
    kv: KVCacheOptions,
    kernels: KernelsMode = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure perplexity and KL by the standard protocol.

    The text is joined, cut into windows that do not overlap, and every token but the first of a window is predicted.
    The score comes from the runtime's own model, so what is measured is what `runtime serve` serves.
    """
    from rich.console import Console

    from compress.cli.show_evaluation import print_evaluation
    from compress.evaluate.session import run_evaluation

    if not ppl:
        raise ToolkitError("nothing to measure was named", "Add --ppl")
    console = Console(stderr=True)
    path = model.expanduser() if model else _default_model(console)
    request = score.request(path, kv.scheme(read_config(path)), kernels)
    with _progress(console) as progress:
        task = progress.add_task("scoring", total=None)
        report = run_evaluation(request, lambda done, total: progress.update(task, completed=done, total=total))
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


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

"""What `compress quantize`, `prune` and `run` share: from a recipe to a finished checkpoint, or to the plan of one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from compress.checkpoint.demo import DEMO_NAME, DEMO_SOURCE, demo_model_path
from compress.cli.option_groups import JobOptions
from compress.recipe import Recipe

if TYPE_CHECKING:
    from compress.pipeline.prepare import Prepared, RunRequest
    from compress.pipeline.run import RunResult


def make_request(model: Path | None, recipe: Recipe, out: Path, job: JobOptions) -> RunRequest:
    """Fills in the demo model where none is named, and says so."""
    from compress.pipeline.prepare import RunRequest

    if model is None:
        _say(f"No model named: using the {DEMO_NAME} ({demo_model_path()})")
    folder = demo_model_path() if model is None else model.expanduser()
    source = DEMO_SOURCE if model is None else str(folder.resolve())
    return RunRequest(
        folder,
        source,
        recipe,
        out.expanduser(),
        device=job.device,
        dtype=job.dtype,
        restart=not job.resume,
        trust_remote_code=job.trust_remote_code,
    )


def carry_out(model: Path | None, recipe: Recipe, out: Path, job: JobOptions) -> None:
    """Plans, and unless only the plan was asked for, runs. Prints results on standard output, progress on the other.

    Args:
        model: folder of a dense model; None for the demo model.
        out: folder to write.

    Raises:
        ToolkitError: see `compress.pipeline.prepare.prepare` and `compress.pipeline.run`.
        KeyboardInterrupt: after saying how to resume.
    """
    from compress.cli.show import print_plan, print_result
    from compress.pipeline.prepare import prepare

    prepared = prepare(make_request(model, recipe, out, job), job.dry_run)
    if job.dry_run:
        if job.as_json:
            typer.echo(json.dumps(prepared.to_dict(), indent=2))
        else:
            print_plan(prepared)
        return
    _announce(prepared)
    result = _run(prepared, job.as_json)
    if job.as_json:
        typer.echo(json.dumps(result.report, indent=2))
    else:
        print_result(prepared, result)


def _run(prepared: Prepared, quiet: bool) -> RunResult:
    from compress.checkpoint.disk import partial_folder
    from compress.pipeline.run import run

    try:
        return run(prepared, quiet=quiet)
    except KeyboardInterrupt:
        folder = partial_folder(prepared.request.out)
        if folder.exists():
            _say(f"\nInterrupted. Finished blocks are in {folder}: run the same command again to continue, or add")
            _say("--restart to begin anew.")
        else:
            _say("\nInterrupted before anything was written.")
        raise


def _announce(prepared: Prepared) -> None:
    from compress.cli.show import describe_run

    work = sorted({str(assignment) for assignment in prepared.plan.assignments.values()})
    layers = f"{len(prepared.plan.changed)} linear layers: {', '.join(work)}" if work else "nothing but the KV cache"
    _say(f"Compressing {layers}")
    _say(describe_run(prepared))
    for note in prepared.notes:
        _say(f"note: {note}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

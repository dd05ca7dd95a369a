"""Commands that run a recipe or search for one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.compress_commands import carry_out, keep_gate, make_request
from compress.cli.options import DEFAULT_OUT, Gate, JobOptions, Model, Out, SearchFiles, Seed
from compress.common.cli import as_written, from_written, with_groups
from compress.common.files import in_home
from compress.evaluate.gate import parse_gate
from compress.recipe import CalibrationOptions, Recipe
from compress.search.space import Goal, SearchRequest

if TYPE_CHECKING:
    from compress.pipeline.prepare import RunRequest
    from compress.search.run import Files, Findings
    from compress.search.survey import Survey


def carry_out_search(
    model: Path | None, search: SearchRequest, out: Path, wanted: SearchFiles, job: JobOptions, gate: str
) -> None:
    """Plans a search and, unless it is a dry run, measures, chooses and compresses. Raises ToolkitError: see
    `compress.search.survey.survey` and `compress.search.run`; KeyboardInterrupt: after printing how to resume."""
    from compress.cli.tables import print_survey
    from compress.search.survey import survey

    limits = parse_gate(gate)
    found = survey(search, make_request(model, search.probe(), out, job, limits), job.dry_run)
    if not job.dry_run:
        _search(found, wanted, job, limits)
    elif job.as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_survey(found)


def _search(survey: Survey, wanted: SearchFiles, job: JobOptions, limits: Mapping[str, float]) -> None:
    from compress.cli.tables import describe_survey, print_choice, print_result
    from compress.search.run import carry_out, find

    files = _files(survey.run, wanted)
    for line in describe_survey(survey):
        print(line, file=sys.stderr, flush=True)
    try:
        findings = find(survey, files, quiet=job.as_json)
        if wanted.recipe_only:
            _stop_at_recipe(findings, files, job.as_json)
            return
        found = carry_out(findings, files, quiet=job.as_json)
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. Results so far are in {files.sensitivities}: run the same command again to continue.",
            file=sys.stderr,
        )
        raise
    if job.as_json:
        typer.echo(json.dumps(found.run.report, indent=2))
    else:
        print_choice(survey, found.choice, found.tries, files.recipe)
        print_result(survey.context, found.run, with_tip=False)
    keep_gate(limits, found.run)


def _stop_at_recipe(findings: Findings, files: Files, as_json: bool) -> None:
    from compress.cli.tables import print_choice
    from compress.search.run import record, write_choice

    choice = findings.first_choice()
    write_choice(findings, choice, files)
    if as_json:
        typer.echo(json.dumps(record(findings.survey, findings.known, choice, ()), indent=2))
    else:
        print_choice(findings.survey, choice, (), files.recipe)


def _files(request: RunRequest, wanted: SearchFiles) -> Files:
    from compress.search.run import Files

    out = request.out
    sensitivities = wanted.sensitivities or out.with_name(f"{out.name}.sensitivities.json")
    recipe = wanted.recipe or out.with_name(f"{out.name}.yaml")
    return Files(in_home(sensitivities), in_home(recipe), request.command)


@with_groups
def run(
    *,
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a bundled recipe: int4-awq, int4-gptq, int8-rtn, ...")],
    model: Model = None,
    out: Out = DEFAULT_OUT,
    gate: Gate = "",
    job: JobOptions,
) -> None:
    """Run a recipe on a model.

    A recipe is a YAML file with a list of stages, which may give layers different methods and widths, or with a search
    for them, see `compress search`.
    """
    from compress.recipe_file import load_work

    work = load_work(recipe)
    if isinstance(work, Recipe):
        carry_out(model, work, out, job, gate)
    else:
        carry_out_search(model, work, out, SearchFiles(), job, gate)


@partial(with_groups, wanted=as_written(SearchRequest))
def search(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    goal: Goal,
    wanted: Mapping[str, Any],
    files: SearchFiles,
    text: CalibrationOptions,
    seed: Seed = 0,
    gate: Gate = "",
    job: JobOptions,
) -> None:
    """Search for a form per layer that meets a target of size or quality, and compress with it.

    Measures how much each layer alone, in each form, changes the model's output (KL on calibration text), and chooses
    the forms with the least sum. Writes the choice as a recipe, runs it, and verifies and evaluates the result.
    Measurements are stored: an interrupted command resumes, and other targets reuse them.
    """
    request = from_written(SearchRequest, wanted, goal=goal, calibration=text, seed=seed, name=goal.name)
    carry_out_search(model, request, out, files, job, gate)

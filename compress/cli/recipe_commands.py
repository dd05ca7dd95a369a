"""Commands that run a recipe or search for one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.compress_commands import carry_out, make_request
from compress.cli.options import DEFAULT_OUT, Ignore, JobOptions, Model, Out, SearchFiles, TargetOptions, TextOptions
from compress.common.cli import with_groups
from compress.common.files import in_home
from compress.recipe import Recipe
from compress.search.space import DEFAULT_CANDIDATES, DEFAULT_MEASURED, DEFAULT_TRIES, SearchRequest, parse_candidates

if TYPE_CHECKING:
    from compress.pipeline.prepare import RunRequest
    from compress.search.run import Files, Findings
    from compress.search.survey import Survey


def carry_out_search(
    model: Path | None, search: SearchRequest, out: Path, wanted: SearchFiles, job: JobOptions
) -> None:
    """Plans a search and, unless it is a dry run, measures, chooses and compresses.

    Raises:
        ToolkitError: see `compress.search.survey.survey` and `compress.search.run`.
        KeyboardInterrupt: after printing how to resume.
    """
    from compress.cli.tables import print_survey
    from compress.search.survey import survey

    found = survey(search, make_request(model, search.probe(), out, job), job.dry_run)
    if not job.dry_run:
        _search(found, wanted, job)
    elif job.as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_survey(found)


def _search(survey: Survey, wanted: SearchFiles, job: JobOptions) -> None:
    from compress.cli.tables import describe_survey, print_choice, print_result
    from compress.search.run import carry_out, find

    files = _files(survey.run, wanted)
    for line in describe_survey(survey):
        print(line, file=sys.stderr, flush=True)
    try:
        findings = find(survey, files, quiet=job.as_json)
        if wanted.recipe_only:
            return _stop_at_recipe(findings, files, job.as_json)
        found = carry_out(findings, files, quiet=job.as_json)
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. Results so far are in {files.sensitivities}: run the same command again to continue.",
            file=sys.stderr,
        )
        raise
    if job.as_json:
        typer.echo(json.dumps(found.run.report, indent=2))
        return None
    print_choice(survey, found.choice, found.tries, files.recipe)
    return print_result(survey.context, found.run, with_tip=False)


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
    job: JobOptions,
) -> None:
    """Run a recipe on a model.

    A recipe is a YAML file with a list of stages, which may give layers different methods and widths, or with a search
    for them, see `compress search`.
    """
    from compress.recipe_file import load_work

    work = load_work(recipe)
    if isinstance(work, Recipe):
        carry_out(model, work, out, job)
    else:
        carry_out_search(model, work, out, SearchFiles(), job)


@with_groups
def search(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    target: TargetOptions,
    offered: Annotated[
        str,
        typer.Option(
            "--candidates",
            metavar="FORM,...",
            help="Forms that layers may take: w4g64 (width, columns that share a scale), rank0.8 or asvd0.8 (share of "
            "the weights in two factors), 2:4 (pruned), rank0.8w8, 2:4w4g128, dense.",
        ),
    ] = DEFAULT_CANDIDATES,
    method: Annotated[str, typer.Option(help="gptq, or rtn (no calibration, lower quality).")] = "gptq",
    measured: Annotated[
        int, typer.Option(help="Number of calibration sequences for measurements; rounding does not use them.")
    ] = DEFAULT_MEASURED,
    tries: Annotated[
        int, typer.Option(help="Maximum number of checkpoints written to approach --max-kl.")
    ] = DEFAULT_TRIES,
    ignore: Ignore = None,
    ends: Annotated[
        bool,
        typer.Option(
            "--include-embeddings",
            help="Also choose the bits of token embedding and head; the result then loads in this runtime only.",
        ),
    ] = False,
    files: SearchFiles,
    text: TextOptions,
    job: JobOptions,
) -> None:
    """Search for a form per layer that meets a target of size or quality, and compress with it.

    Measures how much each layer alone, in each form, changes the model's output (KL on calibration text), and chooses
    the forms with the least sum. Writes the choice as a recipe, runs it, and verifies and evaluates the result.
    Measurements are stored: an interrupted command resumes, and other targets reuse them.
    """
    goal = target.goal()
    request = SearchRequest(
        goal,
        parse_candidates(offered),
        method,
        measured,
        tries,
        tuple(ignore or ()),
        ends,
        text.options,
        text.seed,
        goal.name,
    )
    carry_out_search(model, request, out, files, job)

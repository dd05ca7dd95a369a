"""What `compress search` and `compress run` with a recipe that searches share."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from compress.cli.job import make_request
from compress.cli.option_groups import JobOptions
from compress.cli.search_options import SearchFiles
from compress.search.request import SearchRequest

if TYPE_CHECKING:
    from compress.search.search import Files, Findings
    from compress.search.survey import Survey


def carry_out_search(
    model: Path | None, search: SearchRequest, out: Path, wanted: SearchFiles, job: JobOptions
) -> None:
    """Surveys, and unless only that was asked for, measures, chooses and compresses.

    Raises:
        ToolkitError: see `compress.search.survey.survey` and `compress.search.search`.
        KeyboardInterrupt: after saying how to resume.
    """
    from compress.cli.show_search import print_survey
    from compress.search.survey import survey

    found = survey(search, make_request(model, search.probe(), out, job), job.dry_run)
    if not job.dry_run:
        _search(found, wanted, job)
    elif job.as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_survey(found)


def _search(survey: Survey, wanted: SearchFiles, job: JobOptions) -> None:
    from compress.cli.show import print_result
    from compress.cli.show_search import describe_survey, print_choice
    from compress.search.search import carry_out, find

    files = _files(survey.run.out, wanted)
    for line in describe_survey(survey):
        print(line, file=sys.stderr, flush=True)
    try:
        findings = find(survey, files, quiet=job.as_json)
        if wanted.recipe_only:
            return _stop_at_recipe(findings, files, job.as_json)
        result = carry_out(findings, files, quiet=job.as_json)
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. Figures so far are in {files.sensitivities}: the same command continues.", file=sys.stderr
        )
        raise
    if job.as_json:
        typer.echo(json.dumps(result.report, indent=2))
        return None
    print_choice(survey, result.report["search"], files.recipe)
    return print_result(survey.prepared, result, with_tip=False)


def _stop_at_recipe(findings: Findings, files: Files, as_json: bool) -> None:
    from compress.cli.show_search import print_choice
    from compress.search.record import record
    from compress.search.search import write_choice

    choice = findings.first_choice()
    write_choice(findings, choice, files)
    search = record(findings.survey, findings.known, choice, ())
    if as_json:
        typer.echo(json.dumps(search, indent=2))
    else:
        print_choice(findings.survey, search, files.recipe)


def _files(out: Path, wanted: SearchFiles) -> Files:
    from compress.search.search import Files

    sensitivities = wanted.sensitivities or out.with_name(f"{out.name}.sensitivities.json")
    recipe = wanted.recipe or out.with_name(f"{out.name}.yaml")
    command = shlex.join(["compress", *sys.argv[1:]])
    return Files(sensitivities.expanduser(), recipe.expanduser(), command)

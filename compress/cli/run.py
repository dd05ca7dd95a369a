"""`compress run`: the same pipeline, told what to do by a recipe file."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.option_groups import with_groups
from compress.cli.job import carry_out
from compress.cli.option_groups import JobOptions
from compress.cli.options import DEFAULT_OUT, Model, Out
from compress.cli.search_options import SearchFiles
from compress.recipe import Recipe


@with_groups
def run(
    *,
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a bundled recipe: int4-awq, int4-gptq, int8-rtn, ...")],
    model: Model = None,
    out: Out = DEFAULT_OUT,
    job: JobOptions,
) -> None:
    """Run a recipe on a model.

    A recipe is a YAML file with a list of stages, so different layers can get different methods and widths; or with
    a search for them, see `compress search`.
    """
    from compress.cli.search_job import carry_out_search
    from compress.recipe_file import load_work

    work = load_work(recipe)
    if isinstance(work, Recipe):
        carry_out(model, work, out, job)
    else:
        carry_out_search(model, work, out, SearchFiles(), job)

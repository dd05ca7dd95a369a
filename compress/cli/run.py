"""`compress run`: the same pipeline, told what to do by a recipe file."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.cli.job import carry_out, make_request
from compress.cli.options import DEFAULT_OUT, AsJson, Device, DryRun, Dtype, Model, Out, Resume, TrustRemoteCode


def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a bundled recipe: int4-awq, int4-gptq, int8-rtn, ...")],
    model: Model = None,
    out: Out = DEFAULT_OUT,
    device: Device = "auto",
    dtype: Dtype = "auto",
    resume: Resume = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run a recipe on a model.

    A recipe is a YAML file with a list of stages, so different layers can get different methods and widths.
    """
    from compress.recipe_file import load_recipe

    request = make_request(
        model,
        load_recipe(recipe),
        out=out,
        device=device,
        dtype=dtype,
        resume=resume,
        trust_remote_code=trust_remote_code,
    )
    carry_out(request, dry_run=dry_run, as_json=as_json)

"""`compress search`: bits, rank or sparsity of every layer by its measured sensitivity."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.option_groups import with_groups
from compress.cli.option_groups import JobOptions, TextOptions
from compress.cli.options import DEFAULT_OUT, Ignore, Model, Out
from compress.cli.search_job import carry_out_search
from compress.cli.search_options import SearchFiles, TargetOptions
from compress.search.menu import DEFAULT_MENU, parse_menu
from compress.search.request import DEFAULT_MEASURED, DEFAULT_TRIES, SearchRequest


@with_groups
def search(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    target: TargetOptions,
    menu: Annotated[
        str,
        typer.Option(
            metavar="FORM,...",
            help="What layers may become: w4g64 (width, columns that share a scale), rank0.8 or asvd0.8 (share of the "
            "weights in two factors), 2:4 (pruned), rank0.8w8, 2:4w4g128, dense.",
        ),
    ] = DEFAULT_MENU,
    method: Annotated[str, typer.Option(help="gptq, or rtn (needs no calibration, and loses more).")] = "gptq",
    measured: Annotated[
        int, typer.Option(help="Sequences of the calibration text to measure on; rounding does not see them.")
    ] = DEFAULT_MEASURED,
    tries: Annotated[int, typer.Option(help="Checkpoints that --max-kl may make to come close.")] = DEFAULT_TRIES,
    ignore: Ignore = None,
    ends: Annotated[
        bool,
        typer.Option(
            "--ends", help="Decide about the bits of token embedding and head too; then only this runtime loads it."
        ),
    ] = False,
    files: SearchFiles,
    text: TextOptions,
    job: JobOptions,
) -> None:
    """Find what every layer should become to fit a target best, and compress so.

    Measures how far each layer alone, in each form, moves the whole model's output (KL on calibration text), and
    chooses so that these add up to least. Writes the choice as a recipe, runs it, verifies and measures the result.
    Figures are kept as they come: interrupted, the same command continues, and another target needs no new ones.
    """
    goal = target.goal()
    request = SearchRequest(
        goal, parse_menu(menu), method, measured, tries, tuple(ignore or ()), ends, text.options, text.seed, goal.name
    )
    carry_out_search(model, request, out, files, job)

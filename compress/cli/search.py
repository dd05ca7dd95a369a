"""`compress search`: bits, rank or sparsity of every layer by its measured sensitivity."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.option_groups import with_groups
from compress.cli.option_groups import JobOptions, SearchFiles, TextOptions
from compress.cli.options import DEFAULT_OUT, Ignore, Model, Out
from compress.cli.search_job import carry_out_search
from compress.search.goal import Goal, parse_size
from compress.search.menu import DEFAULT_MENU, parse_menu
from compress.search.request import DEFAULT_MEASURED, DEFAULT_TRIES, SearchRequest


@with_groups
def search(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    target_bpw: Annotated[
        float | None, typer.Option("--target-bpw", help="Best quality within so many bits per weight, scales included.")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option("--target-size", metavar="SIZE", help="Best quality within a size: 5GB, 800MB.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Least size whose measured KL to the dense model is at most this.")
    ] = None,
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
    goal = Goal(target_bpw, None if target_size is None else parse_size(target_size), max_kl)
    request = SearchRequest(
        goal, parse_menu(menu), method, measured, tries, tuple(ignore or ()), ends, text.options, text.seed, goal.name
    )
    carry_out_search(model, request, out, files, job)

"""`compress prune`: zeros in the linear layers, stored or left out, in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.option_groups import with_groups
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.cli.job import carry_out
from compress.cli.option_groups import JobOptions, TextOptions
from compress.cli.options import DEFAULT_OUT, Ignore, Model, Out
from compress.stages.prune import DEFAULT_SPREAD, PruneStage
from compress.stages.quantize import QuantizeStage, group_size_from
from compress.stages.table import Stage


@with_groups
def prune(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    method: Annotated[
        str, typer.Option(help="sparsegpt, wanda, ria, or magnitude (needs no calibration).")
    ] = "sparsegpt",
    pattern: Annotated[
        str,
        typer.Option(
            metavar="N:M|none", help="2:4, 4:8 or another N:4 or N:8, zeros not stored; none prunes anywhere."
        ),
    ] = "2:4",
    sparsity: Annotated[float, typer.Option(help="Share of the weights that go, with --pattern none.")] = 0.5,
    layerwise: Annotated[
        str, typer.Option(help="uniform prunes all blocks alike; owl prunes those with outliers less, others more.")
    ] = "uniform",
    spread: Annotated[
        float, typer.Option(help="Most that a block's sparsity differs from the mean, with --layerwise owl.")
    ] = DEFAULT_SPREAD,
    outlier_factor: Annotated[
        float, typer.Option(help="Scores above this many times their mean are outliers, with --layerwise owl.")
    ] = 5.0,
    bits: Annotated[
        int | None, typer.Option(help="Round what is left to 2 to 8 bits, by GPTQ together with the pruning.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="Input columns that share a scale, with --bits.")] = 128,
    ignore: Ignore = None,
    text: TextOptions,
    job: JobOptions,
) -> None:
    """Prune a model's linear layers, and quantize what is left if asked to.

    With a pattern the zeros are not stored: 2:4 takes 9 bits per weight instead of 16, and 3.1 with --bits 4.
    """
    left_out = tuple(ignore or ())
    chosen = None if pattern == "none" else Sparsity.parse(pattern)
    stages: list[Stage] = [PruneStage(method, chosen, sparsity, layerwise, outlier_factor, spread, ignore=left_out)]
    name = f"{method}-{pattern}" if layerwise == "uniform" else f"{method}-{pattern}-{layerwise}"
    if bits is not None:
        stages.append(QuantizeStage("gptq", Scheme(bits, group_size_from(group_size)), ignore=left_out))
        name += f"-int{bits}"
    carry_out(model, text.recipe(tuple(stages), name), out, job)

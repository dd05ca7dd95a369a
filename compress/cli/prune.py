"""`compress prune`: zeros in the linear layers, stored or left out, in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.option_groups import with_groups
from compress.checkpoint.scheme import Scheme
from compress.cli.job import carry_out
from compress.cli.option_groups import JobOptions, TextOptions
from compress.cli.options import DEFAULT_OUT, Ignore, Model, Out, check_rounded
from compress.cli.prune_options import PruningOptions
from compress.stages.quantize import QuantizeStage, group_size_from
from compress.stages.table import Stage


@with_groups
def prune(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    pruning: PruningOptions,
    bits: Annotated[
        int | None, typer.Option(help="Round what is left to 2 to 8 bits, by GPTQ together with the pruning.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Input columns that share a scale, with --bits. Default: 128.", show_default=False),
    ] = None,
    ignore: Ignore = None,
    text: TextOptions,
    job: JobOptions,
) -> None:
    """Prune a model's linear layers, and quantize what is left if asked to.

    With a pattern the zeros are not stored: 2:4 takes 9 bits per weight instead of 16, and 3.1 with --bits 4.
    """
    check_rounded(bits, group_size)
    left_out = tuple(ignore or ())
    stages: list[Stage] = [pruning.stage(left_out)]
    name = pruning.name
    if bits is not None:
        scheme = Scheme(bits) if group_size is None else Scheme(bits, group_size_from(group_size))
        stages.append(QuantizeStage("gptq", scheme, ignore=left_out))
        name += f"-int{bits}"
    carry_out(model, text.recipe(tuple(stages), name), out, job)

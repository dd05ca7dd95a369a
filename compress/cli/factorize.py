"""`compress factorize`: linear layers as products of low rank, in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.option_groups import with_groups
from compress.checkpoint.scheme import Scheme
from compress.cli.job import carry_out
from compress.cli.option_groups import JobOptions, TextOptions
from compress.cli.options import DEFAULT_OUT, Ignore, Model, Out, check_rounded
from compress.search.goal import parse_size
from compress.stages.factorize import FactorizeStage
from compress.stages.quantize import QuantizeStage, group_size_from
from compress.stages.table import Stage


@with_groups
def factorize(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    method: Annotated[
        str, typer.Option(help="svd-llm (whitened), asvd (scaled inputs), or svd (needs no calibration).")
    ] = "svd-llm",
    keep: Annotated[float, typer.Option(help="Share of the weights that stay.")] = 0.8,
    allocation: Annotated[
        str, typer.Option(help="block shares ranks out among the layers of a block, model among all; uniform: none.")
    ] = "block",
    target_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="5GB, 700MB: decides --keep, with --allocation model.", show_default=False),
    ] = None,
    bits: Annotated[int | None, typer.Option(help="Round both factors to 2 to 8 bits.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Columns of a factor that share a scale, with --bits. Default: -1, one scale per row.",
            show_default=False,
        ),
    ] = None,
    ignore: Ignore = None,
    text: TextOptions,
    job: JobOptions,
) -> None:
    """Make two smaller matrices of each linear layer, and quantize them if asked to.

    Both are stored and multiplied one after the other. Layers that would not become smaller are kept whole.
    """
    check_rounded(bits, group_size)
    left_out = tuple(ignore or ())
    size = None if target_size is None else parse_size(target_size)
    stages: list[Stage] = [FactorizeStage(method, keep, allocation, ignore=left_out, target_size=size)]
    name = f"{method}-{keep:g}" if target_size is None else f"{method}-{target_size}"
    if bits is not None:
        rounding = "gptq" if stages[0].needs_calibration else "rtn"
        scheme = Scheme(bits, None if group_size is None else group_size_from(group_size))
        stages.append(QuantizeStage(rounding, scheme, ignore=left_out))
        name += f"-int{bits}"
    carry_out(model, text.recipe(tuple(stages), name), out, job)

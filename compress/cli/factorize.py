"""`compress factorize`: linear layers as products of low rank, in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.scheme import Scheme
from compress.cli.job import carry_out, make_request
from compress.cli.options import (
    DEFAULT_OUT,
    AsJson,
    CalibrationText,
    Device,
    DryRun,
    Dtype,
    Ignore,
    Length,
    Model,
    Out,
    Resume,
    Samples,
    Seed,
    TrustRemoteCode,
)
from compress.recipe import (
    DEFAULT_LENGTH,
    DEFAULT_SAMPLES,
    PER_CHANNEL,
    CalibrationOptions,
    FactorizeStage,
    QuantizeStage,
    Recipe,
    Stage,
    group_size_from,
)


def factorize(
    model: Model = None,
    out: Out = DEFAULT_OUT,
    method: Annotated[
        str, typer.Option(help="svd-llm (whitened), asvd (scaled inputs), or svd (needs no calibration).")
    ] = "svd-llm",
    keep: Annotated[float, typer.Option(help="Share of the weights that stay.")] = 0.8,
    allocation: Annotated[
        str, typer.Option(help="block shares ranks out among the layers of a block; uniform gives each its own.")
    ] = "block",
    bits: Annotated[int | None, typer.Option(help="Round both factors to 2 to 8 bits.")] = None,
    group_size: Annotated[
        int, typer.Option(help="Columns of a factor that share a scale, with --bits; -1 is one scale per row.")
    ] = PER_CHANNEL,
    ignore: Ignore = None,
    calibration: CalibrationText = "bundled",
    samples: Samples = DEFAULT_SAMPLES,
    length: Length = DEFAULT_LENGTH,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    resume: Resume = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Make two smaller matrices of each linear layer, and quantize them if asked to.

    Both are stored and multiplied one after the other. Layers that would not become smaller are kept whole.
    """
    left_out = tuple(ignore or ())
    stages: list[Stage] = [FactorizeStage(method, keep, allocation, ignore=left_out)]
    name = f"{method}-{keep:g}"
    if bits is not None:
        rounding = "gptq" if stages[0].needs_calibration else "rtn"
        stages.append(QuantizeStage(rounding, Scheme(bits, group_size_from(group_size)), ignore=left_out))
        name += f"-int{bits}"
    recipe = Recipe(tuple(stages), CalibrationOptions(calibration, samples, length), seed, name=name)
    request = make_request(
        model, recipe, out=out, device=device, dtype=dtype, resume=resume, trust_remote_code=trust_remote_code
    )
    carry_out(request, dry_run=dry_run, as_json=as_json)

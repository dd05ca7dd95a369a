"""`compress prune`: zeros in the linear layers, stored or left out, in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.scheme import Scheme, Sparsity
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
    CalibrationOptions,
    PruneStage,
    QuantizeStage,
    Recipe,
    Stage,
    group_size_from,
)


def prune(
    model: Model = None,
    out: Out = DEFAULT_OUT,
    method: Annotated[
        str, typer.Option(help="sparsegpt, wanda, ria, or magnitude (needs no calibration).")
    ] = "sparsegpt",
    pattern: Annotated[
        str, typer.Option(metavar="N:M|none", help="2:4 or 4:8, stored without the zeros; none prunes anywhere.")
    ] = "2:4",
    sparsity: Annotated[float, typer.Option(help="Share of the weights that go, with --pattern none.")] = 0.5,
    bits: Annotated[
        int | None, typer.Option(help="Round what is left to 2 to 8 bits, by GPTQ together with the pruning.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="Input columns that share a scale, with --bits.")] = 128,
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
    """Prune a model's linear layers, and quantize what is left if asked to.

    With a pattern the zeros are not stored: 2:4 takes 9 bits per weight instead of 16, and 3.1 with --bits 4.
    """
    left_out = tuple(ignore or ())
    chosen = None if pattern == "none" else Sparsity.parse(pattern)
    stages: list[Stage] = [PruneStage(method, chosen, sparsity, ignore=left_out)]
    name = f"{method}-{pattern}"
    if bits is not None:
        stages.append(QuantizeStage("gptq", Scheme(bits, group_size_from(group_size)), ignore=left_out))
        name += f"-int{bits}"
    recipe = Recipe(tuple(stages), CalibrationOptions(calibration, samples, length), seed, name=name)
    request = make_request(
        model, recipe, out=out, device=device, dtype=dtype, resume=resume, trust_remote_code=trust_remote_code
    )
    carry_out(request, dry_run=dry_run, as_json=as_json)

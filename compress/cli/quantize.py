"""`compress quantize`: integer weights for the linear layers, in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.scheme import Scheme
from compress.cli.job import carry_out, make_request
from compress.cli.options import DEFAULT_OUT, AsJson, Device, DryRun, Dtype, Model, Out, Resume, TrustRemoteCode
from compress.recipe import (
    DEFAULT_LENGTH,
    DEFAULT_SAMPLES,
    CalibrationOptions,
    QuantizeStage,
    Recipe,
    group_size_from,
)


def quantize(
    model: Model = None,
    out: Out = DEFAULT_OUT,
    method: Annotated[str, typer.Option(help="awq, gptq, or rtn (needs no calibration).")] = "awq",
    bits: Annotated[int, typer.Option(help="Bits of a weight, 2 to 8.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row.")
    ] = 128,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Fixed or stored zero points. Symmetric loads everywhere.")
    ] = True,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer to leave dense: a name (down_proj), a glob, or re:PATTERN. May be repeated."),
    ] = None,
    calibration: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="Text to calibrate on: bundled, a .txt/.jsonl file or a datasets name."),
    ] = "bundled",
    samples: Annotated[int, typer.Option(help="Calibration sequences.")] = DEFAULT_SAMPLES,
    length: Annotated[int, typer.Option(help="Tokens of a calibration sequence.")] = DEFAULT_LENGTH,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Annotated[int, typer.Option(help="Decides which calibration sequences are taken.")] = 0,
    resume: Resume = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Quantize a model's linear layers to 2 to 8 bits.

    Works block by block with little memory; killed at any moment, the same command continues where it stopped and gives
    the same bytes. The result is checked, measured and loads in vLLM, SGLang and transformers.
    """
    stage = QuantizeStage(method, Scheme(bits, group_size_from(group_size), symmetric), ignore=tuple(ignore or ()))
    recipe = Recipe((stage,), CalibrationOptions(calibration, samples, length), seed, name=f"int{bits}-{method}")
    request = make_request(
        model, recipe, out=out, device=device, dtype=dtype, resume=resume, trust_remote_code=trust_remote_code
    )
    carry_out(request, dry_run=dry_run, as_json=as_json)

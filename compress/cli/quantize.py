"""`compress quantize`: integer weights for the linear layers, in one command."""

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
    CalibrationOptions,
    QuantizeStage,
    Recipe,
    default_scheme,
    group_size_from,
)


def quantize(
    model: Model = None,
    out: Out = DEFAULT_OUT,
    method: Annotated[str, typer.Option(help="awq, gptq, smoothquant (W8A8), or rtn (needs no calibration).")] = "awq",
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight, 2 to 8.  [default: 4; smoothquant: 8]", show_default=False)
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row.  "
            "[default: 128; smoothquant: -1]",
            show_default=False,
        ),
    ] = None,
    activation_bits: Annotated[
        int | None,
        typer.Option(
            help="8: inputs of the layers are rounded to 8 bits, token by token (W8A8).  "
            "[default: 16-bit inputs; smoothquant: 8]",
            show_default=False,
        ),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="SmoothQuant's exponent for all layers; without it each layer's is searched.")
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Fixed or stored zero points. Symmetric loads everywhere.")
    ] = True,
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
    """Quantize a model's linear layers to 2 to 8 bits.

    Works block by block with little memory; killed at any moment, the same command continues where it stopped and gives
    the same bytes. The result is checked, measured and loads in vLLM, SGLang and transformers.
    """
    scheme = make_scheme(method, bits, group_size, symmetric, activation_bits)
    stage = QuantizeStage(method, scheme, ignore=tuple(ignore or ()), alpha=alpha)
    recipe = Recipe((stage,), CalibrationOptions(calibration, samples, length), seed, name=f"int{scheme.bits}-{method}")
    request = make_request(
        model, recipe, out=out, device=device, dtype=dtype, resume=resume, trust_remote_code=trust_remote_code
    )
    carry_out(request, dry_run=dry_run, as_json=as_json)


def make_scheme(
    method: str, bits: int | None, group_size: int | None, symmetric: bool, activation_bits: int | None
) -> Scheme:
    """What the options say, and for the rest what the method is for."""
    default = default_scheme(method)
    return Scheme(
        default.bits if bits is None else bits,
        default.group_size if group_size is None else group_size_from(group_size),
        symmetric,
        default.activation_bits if activation_bits is None else activation_bits,
    )

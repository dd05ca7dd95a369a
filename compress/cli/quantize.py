"""`compress quantize`: integers or 8-bit floats for the linear layers, in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from compress.checkpoint.option_groups import with_groups
from compress.checkpoint.scheme import Scheme
from compress.cli.job import carry_out
from compress.cli.option_groups import JobOptions, TextOptions
from compress.cli.options import DEFAULT_OUT, Ignore, Model, Out
from compress.stages.kv_cache import KVCacheStage
from compress.stages.quantize import (
    QuantizeStage,
    activation_bits_from,
    default_method,
    default_scheme,
    end_stages,
    group_size_from,
)
from compress.stages.rotate import RotateStage
from compress.stages.table import Stage
from compress.stages.tuning import Tuning


@with_groups
def quantize(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    method: Annotated[
        str | None,
        typer.Option(
            help="awq, gptq, gptaq (gptq that also makes up for the layers before), signround (gptq, then learned "
            "rounding: slow, best at 2 and 3 bits), smoothquant (W8A8), or without calibration rtn or hqq. "
            "Default: awq; with --fp8: rtn.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight, 2 to 8. Default: 4; smoothquant: 8.", show_default=False)
    ] = None,
    fp8: Annotated[
        bool,
        typer.Option(
            "--fp8",
            help="8-bit floats (e4m3) for weights and inputs in place of integers, for GPUs that multiply them "
            "(NVIDIA since Ada and Hopper). By rtn or smoothquant.",
        ),
    ] = False,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row. "
            "Default: 128; smoothquant: -1.",
            show_default=False,
        ),
    ] = None,
    activation_bits: Annotated[
        int | None,
        typer.Option(
            help="8: inputs of the layers are rounded to 8 bits, token by token (W8A8). 16: they are not. "
            "Default: 16; smoothquant and --fp8: 8.",
            show_default=False,
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="SmoothQuant's exponent for all layers; default: searched for each. Of gptaq: the share of the drift "
            "of its inputs that a layer makes up for; default: 1.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps in which signround learns the rounding of a block. Default: 200.", show_default=False),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Fixed or stored zero points. Symmetric loads everywhere.")
    ] = True,
    outlier_columns: Annotated[
        float | None,
        typer.Option(
            help="Share of the input columns (0.01), or how many, that stay in 16 bits beside the codes: those that "
            "cost most, or with 8-bit activations the largest. For this runtime only. Default: none.",
            show_default=False,
        ),
    ] = None,
    head_bits: Annotated[
        int | None,
        typer.Option(help="Bits of an output head that is not the embedding. Default: 16.", show_default=False),
    ] = None,
    embedding_bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of the token embedding, and of the head where that is the embedding. Default: 16, which every "
            "engine loads; 8 costs next to nothing, for this runtime only.",
            show_default=False,
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Default form of keys and values, measured on long texts: auto (smallest within a mean KL of 0.01), "
            "int4, k8v4, int8 or fp8. Default: 16 bits, not measured.",
            show_default=False,
        ),
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate",
            help="First turn the residual stream by a Hadamard matrix, folded into the weights: better with one scale "
            "per row, and with outlier channels.",
        ),
    ] = False,
    ignore: Ignore = None,
    text: TextOptions,
    job: JobOptions,
) -> None:
    """Quantize a model's linear layers to integers of 2 to 8 bits, or to 8-bit floats.

    Works block by block with little memory; killed at any moment, the same command continues where it stopped and gives
    the same bytes. The result is checked, measured and loads in vLLM, SGLang and transformers.
    """
    method = method or default_method(fp8)
    scheme = make_scheme(method, bits, group_size, symmetric, activation_bits, fp8=fp8)
    tuning = None if steps is None else Tuning(steps)
    left_out = tuple(ignore or ())
    stage = QuantizeStage(method, scheme, ignore=left_out, alpha=alpha, tuning=tuning, outlier_columns=outlier_columns)
    stages: tuple[Stage, ...] = (stage, *end_stages(stage, head_bits, embedding_bits))
    name = f"{'fp' if fp8 else 'int'}{scheme.bits}-{method}"
    if rotate:
        stages, name = (RotateStage(), *stages), f"{name}-rotated"
    if kv_cache is not None:
        stages, name = (*stages, KVCacheStage(kv_cache)), f"{name}-kv-{kv_cache}"
    carry_out(model, text.recipe(stages, name), out, job)


def make_scheme(
    method: str,
    bits: int | None,
    group_size: int | None,
    symmetric: bool,
    activation_bits: int | None,
    *,
    fp8: bool = False,
) -> Scheme:
    """What the options say, and for the rest what the method is for."""
    default = default_scheme(method, fp8)
    return Scheme(
        default.bits if bits is None else bits,
        default.group_size if group_size is None else group_size_from(group_size),
        symmetric,
        default.activation_bits if activation_bits is None else activation_bits_from(activation_bits),
        fp8=fp8,
    )

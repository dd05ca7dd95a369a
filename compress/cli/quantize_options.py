"""Options of `compress quantize`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from compress.checkpoint.scheme import Scheme
from compress.stages.quantize import (
    QuantizeStage,
    activation_bits_from,
    default_method,
    default_scheme,
    group_size_from,
)
from compress.stages.tuning import Tuning

KVDefault = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Default form of keys and values, measured on long texts: auto (smallest within a mean KL of 0.01), "
        "int4, k8v4, int8 or fp8. Default: 16 bits, not measured.",
        show_default=False,
    ),
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="First turn the residual stream by a Hadamard matrix, folded into the weights: better with one scale "
        "per row, and with outlier channels.",
    ),
]


@dataclass(frozen=True, slots=True)
class RoundingOptions:
    """What the linear layers are rounded to, and how. None is what the method is for."""

    method: Annotated[
        str | None,
        typer.Option(
            help="awq, gptq, gptaq (gptq that also makes up for the layers before), signround (gptq, then learned "
            "rounding: slow, best at 2 and 3 bits), smoothquant (W8A8), or without calibration rtn or hqq. "
            "Default: awq; with --fp8: rtn.",
            show_default=False,
        ),
    ] = None
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight, 2 to 8. Default: 4; smoothquant: 8.", show_default=False)
    ] = None
    fp8: Annotated[
        bool,
        typer.Option(
            "--fp8",
            help="8-bit floats (e4m3) for weights and inputs in place of integers, for GPUs that multiply them "
            "(NVIDIA since Ada and Hopper). By rtn or smoothquant.",
        ),
    ] = False
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row. "
            "Default: 128; smoothquant: -1.",
            show_default=False,
        ),
    ] = None
    activation_bits: Annotated[
        int | None,
        typer.Option(
            help="8: inputs of the layers are rounded to 8 bits, token by token (W8A8). 16: they are not. "
            "Default: 16; smoothquant and --fp8: 8.",
            show_default=False,
        ),
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            help="SmoothQuant's exponent for all layers; default: searched for each. Of gptaq: the share of the drift "
            "of its inputs that a layer makes up for; default: 1.",
            show_default=False,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(help="Steps in which signround learns the rounding of a block. Default: 200.", show_default=False),
    ] = None
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Fixed or stored zero points. Symmetric loads everywhere.")
    ] = True
    outlier_columns: Annotated[
        float | None,
        typer.Option(
            help="Share of the input columns (0.01), or how many, that stay in 16 bits beside the codes: those that "
            "cost most, or with 8-bit activations the largest. For this runtime only. Default: none.",
            show_default=False,
        ),
    ] = None

    def stage(self, ignore: tuple[str, ...]) -> QuantizeStage:
        """What the options say, for all layers but those that match `ignore`. Raises RecipeError, SchemeError."""
        return QuantizeStage(
            self._method,
            self.scheme,
            ignore=ignore,
            alpha=self.alpha,
            tuning=None if self.steps is None else Tuning(self.steps),
            outlier_columns=self.outlier_columns,
        )

    @property
    def scheme(self) -> Scheme:
        """The numbers that weights become. Raises SchemeError."""
        default = default_scheme(self._method, self.fp8)
        return Scheme(
            default.bits if self.bits is None else self.bits,
            default.group_size if self.group_size is None else group_size_from(self.group_size),
            self.symmetric,
            default.activation_bits if self.activation_bits is None else activation_bits_from(self.activation_bits),
            fp8=self.fp8,
        )

    @property
    def _method(self) -> str:
        return self.method or default_method(self.fp8)


@dataclass(frozen=True, slots=True)
class EndOptions:
    """Bits of the matrices outside of the blocks."""

    head_bits: Annotated[
        int | None,
        typer.Option(help="Bits of an output head that is not the embedding. Default: 16.", show_default=False),
    ] = None
    embedding_bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of the token embedding, and of the head where that is the embedding. Default: 16, which every "
            "engine loads; 8 costs next to nothing, for this runtime only.",
            show_default=False,
        ),
    ] = None

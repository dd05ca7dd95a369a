"""The keys of every stage: options of the command line and keys of a recipe, from the same data classes.

Options of methods come from the registry, so `quantize_keys` is built when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from compress.checkpoint.weights import NMSparsity, Scheme
from compress.common.errors import RecipeError
from compress.methods import base
from compress.methods.kv_cache import KVCacheStage
from compress.methods.rotation import RotateStage
from compress.recipe import (
    DEFAULT_FP8_METHOD,
    DEFAULT_METHOD,
    DEFAULT_OUTLIER_FACTOR,
    DEFAULT_SPREAD,
    FactorizeStage,
    PruneStage,
    QuantizeStage,
    Stage,
    activation_bits_from,
    default_method,
    default_scheme,
    group_size_from,
)
from compress.search.space import parse_size


@dataclass(frozen=True)
class QuantizeKeys:
    """Keys of a quantize stage without those of methods. None takes the method's default."""

    method: str | None = None
    bits: Annotated[int | None, "Bits of a weight, 2 to 8. Default: 4; smoothquant and --fp8: 8."] = None
    fp8: Annotated[
        bool,
        typer.Option(
            "--fp8",
            help="8-bit floats (e4m3) for weights and inputs in place of integers, for GPUs that multiply them "
            "(NVIDIA since Ada and Hopper).",
        ),
    ] = False
    group_size: Annotated[
        int | None,
        "Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row. "
        "Default: 128; smoothquant and --fp8: -1.",
    ] = None
    activation_bits: Annotated[
        int | None,
        "8: round the inputs of the layers to 8 bits, token by token (W8A8). 16: keep them. "
        "Default: 16; smoothquant and --fp8: 8.",
    ] = None
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Fixed or stored zero points. Symmetric loads everywhere.")
    ] = True
    outlier_columns: Annotated[
        float | None,
        "Share of the input columns (0.01), or how many, that stay in 16 bits beside the codes: those that "
        "cost most, or with 8-bit activations the largest. For this runtime only. Default: none.",
    ] = None

    def stage(self, targets: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> QuantizeStage:
        """Build the stage. Raises RecipeError, SchemeError."""
        name = self.method or default_method(self.fp8)
        options = base.make_options(base.quantization(name), self.method_options)
        return QuantizeStage(name, self.scheme, targets, ignore, options, self.outlier_columns)

    @property
    def method_options(self) -> dict[str, Any]:
        """Options of methods that were given."""
        given = {name: getattr(self, name, None) for name in base.options_of("quantize")}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def scheme(self) -> Scheme:
        """The stored form of the weights. Raises RecipeError, SchemeError."""
        values: dict[str, Any] = {"symmetric": self.symmetric}
        if self.bits is not None:
            values["bits"] = self.bits
        if self.group_size is not None:
            values["group_size"] = group_size_from(self.group_size)
        if self.activation_bits is not None:
            values["activation_bits"] = activation_bits_from(self.activation_bits)
        default = default_scheme(self.method or default_method(self.fp8), self.fp8)
        return default.parse({**default.fields(), **values})


@dataclass(frozen=True)
class PruneKeys:
    """Keys of a prune stage."""

    method: str = "sparsegpt"
    pattern: Annotated[
        str,
        typer.Option(
            metavar="N:M|none", help="2:4, 4:8 or another N:4 or N:8, zeros not stored; none prunes anywhere."
        ),
    ] = "none"
    sparsity: Annotated[float, "Share of the weights to remove, with --pattern none."] = 0.5
    layerwise: Annotated[
        str, "uniform prunes all blocks alike; owl prunes blocks with outliers less and the others more."
    ] = "uniform"
    owl_lambda: Annotated[float, "Largest difference of a block's sparsity from the mean, with --layerwise owl."] = (
        DEFAULT_SPREAD
    )
    owl_m: Annotated[float, "Scores above this many times their mean are outliers, with --layerwise owl."] = (
        DEFAULT_OUTLIER_FACTOR
    )

    def stage(self, targets: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> PruneStage:
        """Build the stage. Raises RecipeError, SchemeError."""
        pattern = None if self.pattern == "none" else NMSparsity.parse(self.pattern)
        owl = self.owl_m, self.owl_lambda
        return PruneStage(self.method, pattern, self.sparsity, self.layerwise, *owl, targets, ignore)


@dataclass(frozen=True)
class FactorizeKeys:
    """Keys of a factorize stage."""

    method: str = "svd-llm"
    keep: Annotated[float | None, "Share of the weights to keep. Default: 0.8."] = None
    allocation: Annotated[
        str, "block allocates ranks to the layers of a block, model to all layers; uniform gives all the same share."
    ] = "block"
    target_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="5GB, 700MB: decides --keep, with --allocation model.", show_default=False),
    ] = None

    def stage(self, targets: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> FactorizeStage:
        """Build the stage. Raises RecipeError."""
        if self.keep is not None and self.target_size is not None:
            raise RecipeError("keep and target_size both decide the ranks", "Give one of them")
        size = None if self.target_size is None else parse_size(self.target_size)
        keep = 0.8 if self.keep is None else self.keep
        return FactorizeStage(self.method, keep, self.allocation, targets, ignore, size)


@dataclass(frozen=True)
class RotateKeys:
    """Keys of a rotate stage."""

    heads: bool = True

    def stage(self) -> RotateStage:
        """Build the stage."""
        return RotateStage(self.heads)


@dataclass(frozen=True)
class KVCacheKeys:
    """Keys of a kv_cache stage; see `KVCacheStage`."""

    format: str = "auto"
    rotate: bool | None = None
    sinks: int = 0
    residual_length: int = 0
    max_kl: float = 0.01
    data: str = "pydoc"
    tokens: int = 16384
    max_seq_length: int | None = None

    def stage(self) -> KVCacheStage:
        """Build the stage. Raises RecipeError, SchemeError."""
        cache = self.format, self.rotate, self.sinks, self.residual_length
        return KVCacheStage(*cache, self.max_kl, self.data, self.tokens, self.max_seq_length)


StageKeys = QuantizeKeys | PruneKeys | FactorizeKeys | RotateKeys | KVCacheKeys
PATTERN_STAGES = ("quantize", "prune", "factorize")
"""Stages that take layers by `targets` and `ignore`."""


def stage_keys() -> dict[str, type[Any]]:
    """Return the keys of every kind of stage."""
    return {
        "rotate": RotateKeys,
        "quantize": quantize_keys(),
        "prune": PruneKeys,
        "factorize": FactorizeKeys,
        "kv_cache": KVCacheKeys,
    }


def build_stage(kind: str, keys: Any, targets: tuple[str, ...], ignore: tuple[str, ...]) -> Stage:
    """Build a stage from its keys. Raises RecipeError, SchemeError."""
    stage: Stage = keys.stage(targets, ignore) if kind in PATTERN_STAGES else keys.stage()
    return stage


def quantize_keys() -> type[QuantizeKeys]:
    """Return the keys of a quantize stage, with one field for each option of a registered method."""
    default = f"Default: {DEFAULT_METHOD}; with --fp8: {DEFAULT_FP8_METHOD}."
    method = ("method", Annotated[str | None, method_help("quantize", default)], field(default=None))
    return make_dataclass("QuantizeKeys", [method, *_options("quantize")], bases=(QuantizeKeys,), frozen=True)


def prune_keys() -> type[PruneKeys]:
    """Return the options of `compress prune`, where a pattern is the default."""
    method = ("method", Annotated[str, method_help("prune")], field(default="sparsegpt"))
    hints = get_type_hints(PruneKeys, include_extras=True)
    pattern = ("pattern", hints["pattern"], field(default="2:4"))
    return make_dataclass("PruneKeys", [method, pattern], bases=(PruneKeys,), frozen=True)


def factorize_keys() -> type[FactorizeKeys]:
    """Return the options of `compress factorize`."""
    method = ("method", Annotated[str, method_help("factorize")], field(default="svd-llm"))
    return make_dataclass("FactorizeKeys", [method], bases=(FactorizeKeys,), frozen=True)


def method_help(kind: str, default: str = "") -> str:
    """Return the help of `--method`: every registered method with its own."""
    listed = "; ".join(f"{name} ({method.help})" for name, method in base.METHODS[kind].items())
    return f"{listed}. {default}".strip()


def _options(kind: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield a field for each option of the methods of a kind; None stands for the method's default."""
    for name, methods in base.options_of(kind).items():
        texts, types = [], []
        for method in methods:
            hint = get_type_hints(method.Options, include_extras=True)[name]
            annotated = get_origin(hint) is Annotated
            types.append(get_args(hint)[0] if annotated else hint)
            text = str(get_args(hint)[1]) if annotated else ""
            default = next(each.default for each in fields(method.Options) if each.name == name)
            texts.append(f"{method.name}: {text}" + ("" if default is None else f" Default: {default}."))
        yield name, Annotated[types[0] | None, " ".join(texts)], field(default=None)

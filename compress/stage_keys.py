"""The keys of all stages with what the registry adds: options of the command line and keys of a recipe, from the same
data classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from compress.checkpoint.scheme import FLOAT_BITS, Scheme
from compress.checkpoint.weights import Fp8
from compress.methods import base
from compress.methods.kv_cache import KVCacheStage
from compress.methods.mtp import MtpStage
from compress.methods.rotation import RotateStage
from compress.recipe import (
    PER_CHANNEL,
    FactorizeKeys,
    PruneKeys,
    QuantizeKeys,
    Stage,
    default_method,
    default_scheme,
)

PATTERN_STAGES = ("quantize", "prune", "factorize")
"""Stages that take layers by `targets` and `ignore`."""


def stage_keys() -> dict[str, type[Any]]:
    """Return the keys of every kind of stage."""
    return {
        "rotate": RotateStage,
        "quantize": quantize_keys(),
        "prune": PruneKeys,
        "factorize": FactorizeKeys,
        "kv_cache": KVCacheStage,
        "mtp": MtpStage,
    }


def build_stage(kind: str, keys: Any, targets: tuple[str, ...], ignore: tuple[str, ...]) -> Stage:
    """Build a stage from its keys; a stage without patterns is its own keys. Raises RecipeError, SchemeError."""
    stage: Stage = keys.stage(targets, ignore) if kind in PATTERN_STAGES else keys
    return stage


def quantize_keys() -> type[QuantizeKeys]:
    """Return the keys of a quantize stage, with one field for each option of a registered method."""
    default = f"Default: {default_method()}; with --fp8: {default_method(Fp8.word)}."
    method = ("method", Annotated[str | None, method_help("quantize", default)], field(default=None))
    return make_dataclass(
        "QuantizeKeys", [method, *_scheme_keys(), *_options("quantize")], bases=(QuantizeKeys,), frozen=True
    )


SCHEME_KEYS: Mapping[str, Callable[[Scheme], int]] = {
    "bits": lambda scheme: scheme.bits,
    "group_size": lambda scheme: scheme.group_size or PER_CHANNEL,
    "activation_bits": lambda scheme: scheme.activation_bits or FLOAT_BITS,
}


def _scheme_keys() -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of a scheme, whose help says the default and which methods have another."""
    schemes = {name: default_scheme(name) for name in base.names("quantize")} | {"--fp8": default_scheme("", Fp8.word)}
    hints = get_type_hints(QuantizeKeys, include_extras=True)
    for key, value in SCHEME_KEYS.items():
        usual, others = value(schemes[base.default("quantize")]), dict[int, list[str]]()
        for name, scheme in schemes.items():
            if value(scheme) != usual:
                others.setdefault(value(scheme), []).append(name)
        defaults = [f"Default: {usual}", *(f"{' and '.join(names)}: {other}" for other, names in others.items())]
        kind, text = get_args(hints[key])
        yield key, Annotated[kind, f"{text} {'; '.join(defaults)}."], field(default=None)


def prune_keys() -> type[PruneKeys]:
    """Return the options of `compress prune`, where a pattern is the default."""
    method = ("method", Annotated[str, method_help("prune")], field(default=base.default("prune")))
    hints = get_type_hints(PruneKeys, include_extras=True)
    pattern = ("pattern", hints["pattern"], field(default="2:4"))
    return make_dataclass("PruneKeys", [method, pattern], bases=(PruneKeys,), frozen=True)


def factorize_keys() -> type[FactorizeKeys]:
    """Return the options of `compress factorize`."""
    method = ("method", Annotated[str, method_help("factorize")], field(default=base.default("factorize")))
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

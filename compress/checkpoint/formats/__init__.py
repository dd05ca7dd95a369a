"""Containers of packed checkpoints: the modules of this folder with a `NAME` and the functions of `Format`.

Weights know their own tensors; a container says which forms it holds and describes them in config.json. Containers of
other tools that hold other tensors translate them, with the signatures of `Translation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.config import is_embedding
from compress.checkpoint.formats import auto_round, compress_runtime, compressed_tensors, dense
from compress.checkpoint.scheme import GROUP_SIZES, MAX_BITS, MIN_BITS, targets
from compress.checkpoint.weights import Activations, Int, Scheme, Weight
from compress.checkpoint.weights.base import Get, about
from compress.checkpoint.weights.gguf_blocks import INTEGERS
from compress.common.errors import CheckpointError, SchemeError


class Format(Protocol):
    """Interface of every format module."""

    NAME: str

    def suffixes(self, scheme: Scheme | None = None) -> tuple[str, ...]: ...
    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None: ...
    def modules(self, names: Iterable[str]) -> list[str]: ...
    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]: ...
    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]: ...


class Translation(Format, Protocol):
    """Interface of a format that does not store the tensors of the forms themselves."""

    def encode(self, module: str, weight: Any, dtype: torch.dtype) -> dict[str, Tensor]: ...
    def decode(self, module: str, get: Get, scheme: Any, config: Mapping[str, Any] | None = None) -> Weight: ...
    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]: ...


_MODULES: list[Any] = [import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__)]
FORMATS: dict[str, Format] = {module.NAME: module for module in _MODULES if hasattr(module, "NAME")}
"""Modules of this folder that have a name."""
TRANSLATIONS: dict[str, Translation] = {module.NAME: module for module in _MODULES if hasattr(module, "decode")}
ALIASES = {"auto_round": auto_round.NAME, "intel/auto-round": auto_round.NAME}
"""Other spellings of `quant_method`."""
INPUTS: Mapping[str, Callable[[Mapping[str, Any], Iterable[str]], dict[str, Activations]]] = {
    name: container.inputs for name, container in FORMATS.items() if hasattr(container, "inputs")
}
"""Rounding of inputs by module, of formats whose files may say more of it than schemes do."""


def find_format(name: str) -> Format:
    """Returns the format of this name, as `--format` or `quant_method` spells it. Raises CheckpointError for others."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise CheckpointError(f"quantization format {name!r} is not supported", f"Supported: {', '.join(FORMATS)}")
    return FORMATS[name]


def check_held(format: Format, scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when a format cannot hold a weight `[O, I]` of a scheme, with the formats that can hold it and
    the nearest form that this one can."""
    try:
        format.check(scheme, shape)
    except SchemeError as error:
        holders = [each.NAME for each in (compressed_tensors, compress_runtime) if _is_held(each, scheme, shape)][:1]
        others = " or ".join(f"--format {name}" for name in (*holders, dense.NAME))
        raise SchemeError(error.problem, f"Use {others}{_nearest(format, scheme, shape)}") from error


def _nearest(format: Format, scheme: Scheme, shape: tuple[int, int]) -> str:
    """The nearest form that a format holds, and the commands that make it; empty for a format that holds none."""
    found = nearest_held(format, scheme, shape)
    if found is None:
        return ""
    last = "" if format is compressed_tensors else f", then compress export packed --format {format.NAME} --out OTHER"
    return f"; the nearest form that {format.NAME} holds is {found}: compress quantize SOURCE {_options(found)}{last}"


def _options(target: Scheme) -> str:
    """Options of `compress quantize` that choose a form."""
    if not isinstance(target, Int):
        return f"--weights {target.word}"
    return f"--bits {target.bits} --group-size {-1 if target.group_size is None else target.group_size}"


def nearest_held(format: Format, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
    """Returns the target of compression that a format holds in place of a weight's form: the nearest in size, of the
    same numbers where there are such. None for a format that holds none."""
    integers = (Int(bits, group) for bits in range(MIN_BITS, MAX_BITS + 1) for group in (*GROUP_SIZES, None))
    floats = (form.target() for form in targets().values() if form is not Int)
    fitting = [each for each in (*integers, *floats) if _is_held(format, each, shape)]
    size, is_integer = scheme.stored_bits(*shape), scheme.numbers in (Int.numbers, INTEGERS)

    def distance(other: Scheme) -> tuple[bool, int]:
        return (other.numbers == Int.numbers) != is_integer, abs(other.stored_bits(*shape) - size)

    return min(fitting, key=distance, default=None)


def _is_held(format: Format, scheme: Scheme, shape: tuple[int, int]) -> bool:
    try:
        format.check(scheme, shape)
    except SchemeError:
        return False
    return True


def stored_tensors(format: Format, module: str, weight: Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the stored tensors of one linear layer, by full name.

    Args:
        dtype: the model's, in which scales and unquantized values are stored.

    Raises:
        SchemeError: the format cannot hold the weight, or not exactly.
    """
    if translation := TRANSLATIONS.get(format.NAME):
        return translation.encode(module, weight, dtype)
    with about(module):
        format.check(weight.scheme, weight.shape)
        return {module + suffix: tensor for suffix, tensor in weight.tensors(dtype).items()}


def format_for(schemes: Mapping[str, Scheme]) -> Format:
    """Returns the format of a new checkpoint: the one that most engines load, unless it cannot hold a form.

    Args:
        schemes: by module; other engines read no packed embedding, whatever its scheme.
    """
    special = any(scheme.structure or is_embedding(module) for module, scheme in schemes.items())
    return compress_runtime if special else compressed_tensors

"""The registry of mixers with a state: which file of this folder computes which description."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol

from torch import Tensor

import runtime.model.mixers
from compress.models.mixers.recurrent import Recurrent
from runtime.backends.base import Ops
from runtime.backends.state_memory import StepStates
from runtime.model.weight_reader import WeightReader


class RecurrentLayer(Protocol):
    """Weights of one layer with a state, and what computes it."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""

    def __call__(self, x: Tensor, layer: int, states: StepStates, ops: Ops, /) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""


Load = Callable[[Any, WeightReader], RecurrentLayer]
"""Loads the layer of a description with the reader of its block."""

_LOADERS: dict[type, Load] = {}


def loads(description: type) -> Callable[[Load], Load]:
    """Registers what loads the layers of one kind of description. Raises ValueError where something does already."""

    def add(load: Load) -> Load:
        if description in _LOADERS:
            raise ValueError(f"{description.__name__} is registered already")
        _LOADERS[description] = load
        return load

    return add


def load_recurrent(mixer: Recurrent, block: WeightReader) -> RecurrentLayer:
    """Loads a layer with a state."""
    _import_mixers()
    return _LOADERS[type(mixer)](mixer, block)


@cache
def _import_mixers() -> None:
    for module in iter_modules(runtime.model.mixers.__path__):
        import_module(f"{runtime.model.mixers.__name__}.{module.name}")

"""The registry of mixers: which file of this folder computes which description."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import Tensor

import runtime.model.mixers
from compress.models.block import Block
from compress.models.block_parts import SecondMixer
from runtime.backends.base import Ops
from runtime.backends.model import AttentionWeights, LayerStep, Mixer
from runtime.backends.state_memory import StepStates
from runtime.model.weight_reader import WeightReader

Load = Callable[[Any, WeightReader], Mixer]
"""Loads the mixer of a description with the reader of its block."""

_LOADERS: dict[type, Load] = {}


def loads(description: type) -> Callable[[Load], Load]:
    """Registers what loads the mixers of one kind of description. Raises ValueError where something does already."""

    def add(load: Load) -> Load:
        if description in _LOADERS:
            raise ValueError(f"{description.__name__} is registered already")
        _LOADERS[description] = load
        return load

    return add


def load_mixer(block: Block, reader: WeightReader) -> Mixer | None:
    """Loads the mixer of a block, if it has one."""
    _import_mixers()
    mixers = [_LOADERS[type(each)](each, reader) for each in block.mixers]
    if block.second is not None:
        return ParallelMixers(block.second, *mixers)
    return mixers[0] if mixers else None


@cache
def _import_mixers() -> None:
    for module in iter_modules(runtime.model.mixers.__path__):
        import_module(f"{runtime.model.mixers.__name__}.{module.name}")


class RecurrentMixer(ABC):
    """Weights of a mixer with a state in place of keys and values, and what computes it."""

    __slots__ = ()
    attention: AttentionWeights | None = None

    def __call__(self, x: Tensor, index: int, step: LayerStep) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`. Raises ValueError for states that are not given."""
        if step.states is None:
            raise ValueError(f"layer {index} needs the states of its sequences")
        return step.states.mix(index, x, lambda rows, states: self.compute(rows, index, states, step.ops))

    @abstractmethod
    def compute(self, x: Tensor, layer: int, states: StepStates, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, and keeps states as `states` says."""


@dataclass(frozen=True, slots=True)
class ParallelMixers:
    """Attention and a mixer with a state that read the same, as `SecondMixer` describes."""

    spec: SecondMixer
    first: Mixer
    second: Mixer

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    @property
    def attention(self) -> AttentionWeights | None:
        return self.first.attention

    def __call__(self, x: Tensor, index: int, step: LayerStep) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`."""
        (before, after), (first, last) = self.spec.attention_factors, self.spec.factors
        return self.first(x * before, index, step) * after + self.second(x * first, index, step) * last

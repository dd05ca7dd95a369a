"""Models whose linears add the products of adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from compress.checkpoint.weights.base import cut_rows
from compress.models.cuts import Cut
from runtime.backends.adapted_linear import AdaptedLinear, Factors, Places, StepAdapters
from runtime.backends.base import Ops, Target
from runtime.backends.mlp import Experts
from runtime.backends.model import Model
from runtime.backends.registry import adapted_linear, adapted_mixture

Replaced = TypeVar("Replaced")


def cut_factors(factors: Factors, cut: Cut | None) -> Factors:
    """Returns what a rank needs to change its part of a matrix: rows of `up`, and columns of `down`."""
    if cut is None:
        return factors
    up = cut_rows(factors.up, cut.rows) if cut.rows else factors.up
    if cut.columns is None:
        return Factors(factors.down, up)
    before, after = cut.padding  # columns that the rank multiplies by zeros
    return Factors(factors.down[:, cut.columns.start + before : cut.columns.stop - after], up)


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """A mixture. Without a kernel that takes adapters, rows of each that changes experts are computed apart.

    Attributes:
        base: computes rows of slots that change no experts.
        experts: with adapted linears; their kernel computes rows of all adapters at once.
        linears: the adapted ones.
    """

    base: Experts
    experts: Experts
    linears: tuple[AdaptedLinear, ...]
    step: StepAdapters

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    @property
    def changing(self) -> set[int]:
        """Slots of adapters that change it."""
        return {part.slot for linear in self.linears for part in linear.parts}

    def __call__(self, x: Tensor, hidden: Tensor, ops: Ops, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]`, as `Experts`."""
        if not (changing := self.changing):
            return self.base(x, hidden, ops, routed)
        if self.experts.kernel is not None:
            return self.experts(x, hidden, ops, routed)
        out, read, slots = torch.empty_like(x), x if routed is None else routed, self.step.slots.expand(len(x))
        for slot in slots.unique().tolist():
            (rows,) = (slots == slot).nonzero(as_tuple=True)
            own, seen = x.index_select(0, rows), read.index_select(0, rows)
            if slot not in changing:
                out.index_copy_(0, rows, self.base(own, own, ops, seen))
                continue
            with self.step.only(slot):
                out.index_copy_(0, rows, self.experts.weighted(own, *self.experts.route(seen), ops))
        return out


@dataclass(slots=True)
class Adapting:
    """Replaces the linears of a model by adapted ones.

    Attributes:
        places: of the linears, by their identity.
        linears, mixtures: what they were replaced by.
    """

    step: StepAdapters
    target: Target
    places: Mapping[int, Places]
    linears: list[AdaptedLinear] = field(default_factory=list)
    mixtures: list[AdaptedExperts] = field(default_factory=list)

    def adapt(self, part: Replaced) -> Replaced:
        """Returns a part of a model, such as a layer, with adapted linears; itself where it has none."""
        return self._adapt(part)  # type: ignore[no-any-return]

    def _adapt(self, part: Any) -> Any:
        if (places := self.places.get(id(part))) is not None:
            self.linears.append(adapted_linear(part, places, self.step, self.target))
            return self.linears[-1]
        if isinstance(part, tuple):
            inner = tuple(map(self._adapt, part))
            return part if all(new is old for new, old in zip(inner, part, strict=True)) else inner
        if not is_dataclass(part) or isinstance(part, type) or not type(part).__module__.startswith("runtime."):
            return part
        if isinstance(part, Experts):
            return self._experts(part)
        return self._inside(part, (each.name for each in fields(part) if each.init))

    def _inside(self, part: Any, names: Iterator[str] | Sequence[str], **changed: Any) -> Any:
        new = {name: self._adapt(getattr(part, name)) for name in names}
        changed |= {name: each for name, each in new.items() if each is not getattr(part, name)}
        return replace(part, **changed) if changed else part

    def _experts(self, part: Experts) -> Experts | AdaptedExperts:
        """Adapts a mixture, unless its experts wait in host memory for their turn on the device."""
        if part.slots is not None:
            return part
        first = len(self.linears)
        experts = self._inside(part, ("experts", "shared", "around"), kernel=None)
        if part.kernel is not None:
            experts = replace(experts, kernel=adapted_mixture(experts, self.target))
        self.mixtures.append(AdaptedExperts(part, experts, tuple(self.linears[first:]), self.step))
        return self.mixtures[-1]


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model with the weights of another one that adds adapters.

    Attributes:
        plain: has mixtures that kernels of all layers may know: with adapted linears where their own kernel takes
            them, and as they were where not.
    """

    model: Model
    plain: Model
    linears: Sequence[AdaptedLinear]
    mixtures: Sequence[AdaptedExperts]

    @classmethod
    def of(cls, model: Model, step: StepAdapters) -> Adapted:
        """Adapts the linears of all layers."""
        places = {
            id(linear): tuple(
                (name, end - rows, end)
                for (name, rows), end in zip(modules, accumulate(rows for _, rows in modules), strict=True)
            )
            for modules, linear in model.modules
        }
        adapting = Adapting(step, Target(model.device, model.dtype), places)
        layers = [adapting.adapt(layer) for layer in model.layers]
        plain = [replace(layer, mlp=_plain(layer.mlp)) for layer in layers]
        models = replace(model, layers=layers), replace(model, layers=plain)
        return cls(*models, adapting.linears, adapting.mixtures)

    @property
    def modules(self) -> list[str]:
        """Modules of the checkpoint that are adapted."""
        return [module for linear in self.linears for module, *_ in linear.places]

    @property
    def changes_experts(self) -> bool:
        """Whether an adapter on the device changes experts that no kernel computes."""
        return any(mixture.experts.kernel is None and mixture.changing for mixture in self.mixtures)


def _plain(mlp: Any) -> Any:
    if not isinstance(mlp, AdaptedExperts):
        return mlp
    return mlp.base if mlp.experts.kernel is None else mlp.experts

"""Layers whose linears add the products of adapters: each adapter's for the rows of a step that ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime.adapters.files import Factors, LoraAdapter
from runtime.backends.base import Linear, Ops
from runtime.backends.mlp import Experts
from runtime.backends.model import Model

Part = TypeVar("Part")

Places = tuple[tuple[str, int, int], ...]
"""Modules of the checkpoint side by side in a linear, with the first and last of their columns."""


@dataclass(slots=True)
class ActiveAdapter:
    """An adapter on a device.

    Attributes:
        factors: of modules whose linear was not computed yet.
        products: of linears, by their first module; None for one that the adapter leaves as it is.
    """

    factors: dict[str, Factors]
    products: dict[str, Factors | None] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: LoraAdapter, device: torch.device) -> ActiveAdapter:
        return cls({module: factors.to(device) for module, factors in adapter.factors.items()})

    def product(self, places: Places) -> Factors | None:
        """Returns what is added to a linear, if anything is."""
        first = places[0][0]
        if first not in self.products:
            self.products[first] = self._join(places)
        return self.products[first]

    def _join(self, places: Places) -> Factors | None:
        """Joins the factors of several modules: those that reduce one after the other, the others block by block."""
        found = [(self.factors.pop(module, None), slice(begin, end)) for module, begin, end in places]
        parts = [(factors, columns) for factors, columns in found if factors is not None]
        if not parts or len(places) == 1:
            return parts[0][0] if parts else None
        down = torch.cat([factors.down for factors, _ in parts])
        up, begin = down.new_zeros(places[-1][2], len(down)), 0
        for factors, columns in parts:
            end = begin + len(factors.down)
            up[columns, begin:end] = factors.up
            begin = end
        return Factors(down, up)


AdaptedRows = tuple[ActiveAdapter | None, Tensor | None]
"""An adapter, and the rows that it computes, int64; None are all rows. No adapter computes the other rows."""


@dataclass(slots=True)
class StepAdapters:
    """Adapters of the step that is computed, which all linears of a model read."""

    groups: Sequence[AdaptedRows] = ()

    @contextmanager
    def only(self, adapter: ActiveAdapter) -> Iterator[None]:
        """Lets one adapter compute all rows for a while."""
        groups, self.groups = self.groups, ((adapter, None),)
        try:
            yield
        finally:
            self.groups = groups


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear with the products of adapters, which read its input as it is."""

    base: Linear
    places: Places
    step: StepAdapters

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[T, O]` of `x [T, I]`."""
        out = self.base(x)
        for adapter, rows in self.step.groups:
            product = None if adapter is None else adapter.product(self.places)
            if product is not None:
                read = x if rows is None else x.index_select(0, rows)
                added = (read @ product.down.T) @ product.up.T
                out = out.add_(added) if rows is None else out.index_add_(0, rows, added)
        return out


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """A mixture whose experts are adapted: each adapter's rows are routed, and computed, apart from the others.

    Attributes:
        base: computes rows without an adapter.
        experts: with adapted linears.
    """

    base: Experts
    experts: Experts
    step: StepAdapters

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def __call__(self, x: Tensor, hidden: Tensor, ops: Ops, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]`, as `Experts`."""
        out, read = torch.empty_like(x), x if routed is None else routed
        for adapter, rows in self.step.groups:
            own, seen = (x, read) if rows is None else (x.index_select(0, rows), read.index_select(0, rows))
            if adapter is None:
                found = self.base(own, own, ops, seen)
            else:
                with self.step.only(adapter):
                    found = self.experts.weighted(own, *self.experts.route(seen), ops)
            if rows is None:
                return found
            out.index_copy_(0, rows, found)
        return out


@dataclass(slots=True)
class Adapting:
    """Replaces the linears of a model by adapted ones.

    Attributes:
        places: of the linears, by their identity.
        adapted: modules that were replaced.
    """

    step: StepAdapters
    places: Mapping[int, Places]
    adapted: list[str] = field(default_factory=list)

    def adapt(self, part: Part) -> Part:
        """Returns a part of a model, such as a layer, with adapted linears; itself where it has none."""
        found: Any = part
        if (places := self.places.get(id(part))) is not None:
            self.adapted += [module for module, *_ in places]
            return AdaptedLinear(found, places, self.step)  # type: ignore[return-value]
        if isinstance(part, tuple):
            inner = tuple(map(self.adapt, part))
            return found if all(map(_same, inner, part)) else inner  # type: ignore[return-value]
        if not is_dataclass(part) or isinstance(part, type) or not type(part).__module__.startswith("runtime."):
            return part
        if isinstance(part, Experts):
            return self._experts(part)  # type: ignore[return-value]
        changed = {each.name: self.adapt(getattr(part, each.name)) for each in fields(part) if each.init}
        changed = {name: new for name, new in changed.items() if new is not getattr(part, name)}
        return replace(found, **changed) if changed else part

    def _experts(self, part: Experts) -> Experts | AdaptedExperts:
        """Adapts a mixture, unless its experts wait in host memory for their turn on the device."""
        if part.slots is not None:
            return part
        names = "experts", "shared", "around"
        changed = {name: self.adapt(getattr(part, name)) for name in names}
        return AdaptedExperts(part, replace(part, kernel=None, **changed), self.step)


def _same(one: object, other: object) -> bool:
    return one is other


def places_of(model: Model) -> dict[int, Places]:
    """Returns modules and columns of the linears of a model by their identity."""
    found = {}
    for modules, linear in model.modules:
        places, first = [], 0
        for name, rows in modules:
            places.append((name, first, first + rows))
            first += rows
        found[id(linear)] = tuple(places)
    return found


def adapt(model: Model, step: StepAdapters) -> tuple[Model, list[str]]:
    """Returns a model with the weights of another one that adds adapters, and the modules that it adapts."""
    adapting = Adapting(step, places_of(model))
    layers = [adapting.adapt(layer) for layer in model.layers]
    return replace(model, layers=layers), adapting.adapted

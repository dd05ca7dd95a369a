"""Adapters of an engine on disk, in host memory and on the device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary

import torch

from compress.common.errors import CheckpointError, RequestError, ToolkitError
from compress.models.generic import CodeSpec
from compress.models.spec import ModelSpec
from runtime.adapters.files import AdapterReader, LoraAdapter
from runtime.adapters.layers import Adapted, cut_factors
from runtime.adapters.targets import Targets
from runtime.backends.adapted_linear import Factors, StepAdapters
from runtime.backends.backend import LayersStep
from runtime.backends.model import Model
from runtime.core.adapter import parse_modules
from runtime.core.config import LoraOptions
from runtime.core.step import ScheduledSequence
from runtime.parallel.group import Group


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter by its name.

    Attributes:
        digest: see `LoraAdapter`.
    """

    path: Path
    digest: str


class HostAdapters:
    """Implements `runtime.core.adapter.AdapterStore`.

    Args:
        max_kept: adapters that stay in host memory, those that were used last; requests keep theirs, too.
    """

    def __init__(self, reader: AdapterReader, max_kept: int) -> None:
        self.reader, self.max_kept = reader, max_kept
        self._lock = threading.Lock()
        self._known: dict[str, KnownAdapter] = {}
        self._kept: OrderedDict[str, LoraAdapter] = OrderedDict()
        self._alive: WeakValueDictionary[str, LoraAdapter] = WeakValueDictionary()

    def load(self, name: str, path: Path) -> None:
        self._check_free(name)
        adapter = self.reader.read(name, path)
        with self._lock:
            self._check_free(name)  # others may have loaded it meanwhile
            self._known[name] = KnownAdapter(path, adapter.digest)
            self._keep(adapter)

    def _check_free(self, name: str) -> None:
        if name in self._known:
            raise RequestError(f"an adapter {name!r} is loaded already", "Unload it first, or choose another name")

    def unload(self, name: str) -> None:
        with self._lock:
            if self._known.pop(name, None) is None:
                raise RequestError.unknown("adapter", name, self._known)
            self._kept.pop(name, None)
            self._alive.pop(name, None)

    def find(self, name: str) -> LoraAdapter | None:
        with self._lock:
            adapter = self._kept.get(name) or self._alive.get(name)
            if adapter is not None:
                self._keep(adapter)
            return adapter

    def open(self, name: str) -> LoraAdapter:
        if (adapter := self.find(name)) is not None:
            return adapter
        if (known := self._known.get(name)) is None:
            raise RequestError.unknown("adapter", name, self._known)
        adapter = self.reader.read(name, known.path)
        if adapter.digest != known.digest:
            raise CheckpointError(f"the files of {known.path} have changed since they were loaded", "Unload it first")
        with self._lock:
            if self._known.get(name) is known:  # it may have been unloaded meanwhile
                self._keep(adapter)
        return adapter

    def _keep(self, adapter: LoraAdapter) -> None:
        """Notes that an adapter was used. Needs the lock."""
        self._kept[adapter.name] = self._alive[adapter.name] = adapter
        self._kept.move_to_end(adapter.name)
        while len(self._kept) > self.max_kept:
            self._kept.popitem(last=False)


class DeviceAdapters:
    """The adapters of the steps that a runner computes. A step holds at most `num_slots` different ones.

    Args:
        model: the model without adapters.
        prepare: makes what computes all layers of an adapted model at once, if anything does.
        group: of the ranks that share the model; all of them take part.

    Attributes:
        model: the same weights with adapted linears.
        modules: modules of the checkpoint that are adapted, by any rank.
        all_layers: computes all layers of steps that change no experts; None where nothing does.
    """

    def __init__(
        self,
        model: Model,
        num_slots: int,
        prepare: Callable[[Model], LayersStep | None] = lambda model: None,
        group: Group | None = None,
    ) -> None:
        self._step = StepAdapters()
        self._slots: list[Mapping[str, Factors] | None] = [None] * num_slots
        self._used: OrderedDict[str, int] = OrderedDict()
        self._adapted = Adapted.of(model, self._step)
        self.model, self._modules = self._adapted.model, self._adapted.modules
        self.modules = self._modules if group is None else group.collect_names(self._modules)
        self.all_layers = prepare(self._adapted.plain)

    @property
    def active(self) -> list[str]:
        """Digests of the adapters on the device, the one used last at the end."""
        return list(self._used)

    @property
    def layers(self) -> LayersStep | None:
        """Computes all layers of the step; None where they are computed one by one."""
        return None if self._adapted.changes_experts else self.all_layers

    def begin(self, entries: Sequence[ScheduledSequence]) -> bool:
        """Prepares the adapters of a step; returns whether it has any.

        Args:
            entries: in the order of their rows.
        """
        adapters = [cast("LoraAdapter | None", entry.sequence.request.adapter) for entry in entries]
        wanted = {adapter.digest: adapter for adapter in adapters if adapter is not None}
        if not wanted:
            return False
        if new := [adapter for digest, adapter in wanted.items() if digest not in self._used]:
            self._place(new, wanted)
        for digest in wanted:
            self._used.move_to_end(digest)
        slots = [-1 if adapter is None else self._used[adapter.digest] for adapter in adapters]
        counts = torch.tensor([entry.num_tokens for entry in entries])
        self._step.begin(torch.tensor(slots).repeat_interleave(counts).to(self.model.device, non_blocking=True))
        return True

    def _place(self, new: Sequence[LoraAdapter], wanted: Collection[str]) -> None:
        """Gives adapters slots, those of adapters that were used longest ago if none is free."""
        for adapter in new:
            if None not in self._slots:
                oldest = next(digest for digest in self._used if digest not in wanted)
                self._slots[self._used.pop(oldest)] = None
            slot = self._slots.index(None)
            own = ((name, adapter.factors[name]) for name in self._modules if name in adapter.factors)
            self._slots[slot] = {name: cut_factors(factors, self.model.cuts.get(name)) for name, factors in own}
            self._used[adapter.digest] = slot
        for linear in self._adapted.linears:
            linear.fill([factors or {} for factors in self._slots])


def slot_bytes(model: Model, options: LoraOptions) -> int:
    """Returns the memory on the device of adapters of the highest rank for all linears of a model."""
    columns = {linear.name: linear.in_features for linear in model.config.spec.linears()}
    sizes = sum(
        len(modules) * (columns[modules[0][0]] + sum(rows for _, rows in modules))  # `up` has all columns
        for modules, _ in model.modules
        if modules[0][0] in columns
    )
    return options.max_loras * options.max_lora_rank * sizes * model.dtype.itemsize


def check_adaptable(model: Model, options: LoraOptions) -> None:
    """Raises ToolkitError for a model, or a configuration, without adapters."""
    if isinstance(model.config.spec, CodeSpec):
        raise ToolkitError(
            "LoRA adapters do not fit this model: its own modeling code computes it", "Merge them with PEFT"
        )
    if options.max_cpu_loras < options.max_loras:
        problem = f"--max-cpu-loras {options.max_cpu_loras} is below --max-loras {options.max_loras}"
        raise ToolkitError(problem, "Host memory holds those on the device, too")


def open_adapters(spec: ModelSpec, dtype: torch.dtype, modules: Iterable[str], options: LoraOptions) -> HostAdapters:
    """Reads the adapters of the options.

    Args:
        spec: of the whole model.
        dtype: of activations.
        modules: modules of the checkpoint that are adapted.

    Raises:
        ToolkitError: as `HostAdapters.load`.
    """
    reader = AdapterReader(Targets.of(spec, modules), dtype, options.max_lora_rank)
    adapters = HostAdapters(reader, options.max_cpu_loras)
    for name, path in parse_modules(options.lora_modules or ()).items():
        adapters.load(name, path)
    return adapters

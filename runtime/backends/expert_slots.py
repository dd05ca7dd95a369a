"""Experts of a mixture in host memory, with slots on the device that hold those in use (arXiv:2312.17238)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from compress.common.device import available_bytes, format_bytes
from compress.common.errors import ToolkitError
from runtime.core.expert_cache import ExpertCache, Round

Part = TypeVar("Part")


def tensors_of(part: object) -> Iterator[Tensor]:
    """Yields the tensors inside data classes and tuples."""
    if isinstance(part, Tensor):
        yield part
    for inner in _inner(part):
        yield from tensors_of(inner)


def with_tensors(part: Part, made: Iterator[Tensor]) -> Part:
    """Returns data classes and tuples with other tensors, taken in the order of `tensors_of`."""
    found: Any = part
    if isinstance(part, Tensor):
        found = next(made)
    elif isinstance(part, tuple):
        found = tuple(with_tensors(inner, made) for inner in part)
    elif any(True for _ in tensors_of(part)):
        found = replace(found, **{each.name: with_tensors(getattr(part, each.name), made) for each in fields(found)})
    return found  # type: ignore[no-any-return]


def form_of(part: object) -> object:
    """Returns what two parts must share for the tensors of one to fit in the other; itself where that is not known."""
    if isinstance(part, Tensor):
        return part.shape, part.dtype
    inner = [form_of(each) for each in _inner(part)]
    return (type(part), inner) if inner else part


def _inner(part: object) -> tuple[object, ...]:
    if is_dataclass(part):
        return tuple(getattr(part, each.name) for each in fields(part))
    return part if isinstance(part, tuple) else ()


CHUNK_BYTES, ALIGNMENT = 2**28, 256
"""Pinned memory is taken in powers of two, into which the allocator would round up every tensor of its own."""


@dataclass
class HostMemory:
    """Host memory for experts, pinned where a GPU reads it.

    `copy` raises ToolkitError when there is no more.

    Attributes:
        chunk: bytes of which the first `used` are taken.
    """

    pinned: bool
    chunk: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    used: int = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor."""
        return self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _take(self, nbytes: int) -> Tensor:
        first = -(-self.used // ALIGNMENT) * ALIGNMENT
        if first + nbytes > len(self.chunk):
            size = max(nbytes, CHUNK_BYTES) if self.pinned else nbytes
            if size > (free := available_bytes(torch.device("cpu"))):
                raise ToolkitError(
                    f"{format_bytes(size)} more of experts do not fit in {format_bytes(free)} of free host memory",
                    "Leave out --moe-expert-cache, or use a checkpoint with fewer bits",
                )
            self.chunk, first = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned), 0
        self.used = first + nbytes
        return self.chunk[first : self.used]


class ExpertSlots:
    """Slots on a device for the experts of one mixture.

    A copy waits for what the device computes from the slot, and what is computed next waits for the copy: both are in
    the order of one stream, and the host waits for neither where its memory is pinned.

    Args:
        experts: in host memory, all of one form.
        cache: what lies in which slot.

    Attributes:
        slots: experts on the device.
    """

    def __init__(self, experts: Sequence[Part], cache: ExpertCache, device: torch.device) -> None:
        self.cache, self.device, self.num_experts = cache, device, len(experts)
        self._sources = [list(tensors_of(expert)) for expert in experts]
        self._targets = [
            [torch.empty_like(tensor, device=device) for tensor in self._sources[0]] for _ in range(cache.num_slots)
        ]
        self.slots: list[Any] = [with_tensors(experts[0], iter(tensors)) for tensors in self._targets]
        self.fill()

    @property
    def nbytes(self) -> int:
        """Memory of the slots."""
        return sum(tensor.nbytes for tensors in self._targets for tensor in tensors)

    @property
    def host_nbytes(self) -> int:
        """Memory of the experts on the host."""
        return sum(tensor.nbytes for tensors in self._sources for tensor in tensors)

    def fill(self) -> None:
        """Copies the most popular experts into the slots, and counts from zero."""
        self._load(self.cache.fill())

    def rounds(self, chosen: Tensor) -> Iterator[Tensor]:
        """Yields the slot of each expert in a round, int64 `[E]`, -1 for the others, until all chosen ones were in one.

        Args:
            chosen: int64 experts, of any shape, in host memory as the result.
        """
        for each in self.cache.rounds(chosen.unique().tolist()):
            self._load(each)
            table = torch.full((self.num_experts,), -1)
            table[list(each.slots)] = torch.tensor(list(each.slots.values()))
            yield table

    def one_by_one(self, chosen: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yields the number and the weights of each expert on the device, in the order given."""
        for each in self.cache.one_by_one(chosen):
            self._load(each)
            yield from ((expert, self.slots[slot]) for expert, slot in each.slots.items())

    def _load(self, each: Round) -> None:
        for expert in each.loads:
            for target, source in zip(self._targets[each.slots[expert]], self._sources[expert], strict=True):
                target.copy_(source, non_blocking=True)

"""Memory of an engine that pages and recurrent states move from, or to: rows by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from runtime.backends.kv_pages import BlockMemory
from runtime.backends.state_memory import StateMemory
from runtime.transfer.connector import Connector, Offered, RowShape
from runtime.transfer.messages import PAGES, STATES


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of pages or states, and the place of its part in host memory.

    Attributes:
        kind: `PAGES`, whose rows are blocks, or `STATES`, whose rows are slots.
        rows: on the device, `[blocks or slots, *shape]`.
        host: dictionary with the part in host memory, `[host slots, *shape]`, under `key`.
    """

    kind: str
    rows: Tensor
    host: dict[str, Tensor]
    key: str


Parts = Mapping[str, Part]
"""All parts of an engine by name."""


def find_parts(memories: list[BlockMemory], states: StateMemory | None) -> dict[str, Part]:
    """Returns all parts of pages and recurrent states of a runner."""
    return dict(_parts(memories, states))


def _parts(memories: list[BlockMemory], states: StateMemory | None) -> Iterator[tuple[str, Part]]:
    for index, memory in enumerate(memories):
        for name, tensor in memory.tensors.items():
            yield f"{PAGES}/{index}/{name}", Part(PAGES, tensor.transpose(0, 1), memory.host, name)
    if states is None:
        return
    for layer, tensors in states.tensors.items():
        for name, tensor in tensors.items():
            yield f"{STATES}/{layer}/{name}", Part(STATES, tensor, states.host[layer], name)


def host_shapes(parts: Parts) -> dict[str, RowShape]:
    """Returns the shapes of the parts in host memory."""
    hosts = {name: part.host[part.key] for name, part in parts.items()}
    return {name: RowShape(len(host), tuple(host.shape[1:]), host.dtype) for name, host in hosts.items()}


def place_host(parts: Parts, connector: Connector) -> Offered:
    """Replaces the host memory of an engine, before it is used, by memory that other engines can write."""
    offered = connector.offer(host_shapes(parts))
    for name, part in parts.items():
        part.host[part.key] = offered.tensors[name]
    return offered

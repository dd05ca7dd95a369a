"""NIXL, NVIDIA's library for transfers between processes and machines: the sender writes the receiver's memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from runtime.engine.wire import receive, send
from runtime.transfer.connector import CONNECTORS, Connector, Offered, Remote, RowShape

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
STAGING_BYTES = 8 * 2**20
POLL_SECONDS = 0.0001
KIND = "DRAM"


@cache
def _package() -> str:
    """Returns the name of the installed package; "" without any."""
    return next((name for name in PACKAGES if find_spec(name) is not None), "")


def _new_agent() -> Any:
    api = import_module(f"{_package()}._api")
    return api.nixl_agent(uuid4().hex, api.nixl_agent_config(backends=["UCX"]))


class RegisteredRows(Offered):
    """Tensors that other processes can write through NIXL."""

    def __init__(self, shapes: Mapping[str, RowShape]) -> None:
        self.tensors = {
            name: torch.empty((each.num_rows, *each.shape), dtype=each.dtype) for name, each in shapes.items()
        }
        self._agent = _new_agent()
        self._agent.register_memory([tensor.view(torch.uint8) for tensor in self.tensors.values() if tensor.numel()])

    def send(self, control: socket.socket) -> None:
        addresses = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        send(control, (self._agent.get_agent_metadata(), addresses))


class NixlRows(Remote):
    """Memory of a receiver. Rows are gathered in memory that NIXL knows, and written together.

    Args:
        metadata: of the receiver's agent.
        addresses: of its tensors, by name.
    """

    def __init__(self, metadata: bytes, addresses: Mapping[str, int], shapes: Mapping[str, RowShape]) -> None:
        self._addresses = addresses
        self._row_bytes = {name: each.row_bytes for name, each in shapes.items()}
        self._agent = _new_agent()
        self._receiver = self._agent.add_remote_agent(metadata)
        self._staging = torch.empty(max(STAGING_BYTES, *self._row_bytes.values()), dtype=torch.uint8)
        self._agent.register_memory([self._staging])
        self._rows: list[tuple[int, int, int]] = []  # offset in the staging memory, address there, bytes
        self._used = 0
        self._lock = threading.RLock()

    def write(self, name: str, row: int, content: Tensor) -> None:
        size = self._row_bytes[name]
        with self._lock:
            if self._used + size > len(self._staging):
                self.flush()
            place = self._staging[self._used : self._used + size]
            place.copy_(content.contiguous().view(-1).view(torch.uint8))
            self._rows.append((self._used, self._addresses[name] + row * size, size))
            self._used += size

    def flush(self) -> None:
        with self._lock:
            rows, self._rows, self._used = self._rows, [], 0
            if rows:
                self._transfer(rows)

    def _transfer(self, rows: list[tuple[int, int, int]]) -> None:
        agent, start = self._agent, self._staging.data_ptr()
        here = agent.get_xfer_descs([(start + offset, size, 0) for offset, _, size in rows], KIND)
        there = agent.get_xfer_descs([(address, size, 0) for _, address, size in rows], KIND)
        handle = agent.initialize_xfer("WRITE", here, there, self._receiver)
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            time.sleep(POLL_SECONDS)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state == "ERR":
            raise ConnectionError("NIXL could not write to the receiver")


class Nixl(Connector):
    """NIXL over UCX, from host memory to host memory."""

    def unsupported_reason(self) -> str:
        return "" if _package() else "NIXL is not installed (pip install nixl)"

    def offer(self, shapes: Mapping[str, RowShape]) -> Offered:
        return RegisteredRows(shapes)

    def accept(self, control: socket.socket, shapes: Mapping[str, RowShape]) -> Remote:
        metadata, addresses = receive(control)
        return NixlRows(metadata, addresses, shapes)


CONNECTORS.register("nixl", order=1)(Nixl())

"""Shared memory of two processes of one machine.

The memory is a file without a name, whose descriptor is handed over: when the last process that has it ends, however it
ends, the kernel frees it.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.transfer.connector import CONNECTORS, Connector, Offered, Remote, RowShape

ALIGNMENT = 64


def _open_file() -> int:
    """Returns the descriptor of a new file in memory, on disk where the system has none in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pages")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _end_of(start: int, each: RowShape) -> int:
    size = each.num_rows * each.row_bytes
    return start + -(-size // ALIGNMENT) * ALIGNMENT


def _map(file: int, shapes: Mapping[str, RowShape]) -> dict[str, Tensor]:
    """Returns the tensors of a file, one after the other, which keep it mapped."""
    content = torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
    tensors, start = {}, 0
    for name, each in shapes.items():
        part = content[start : start + each.num_rows * each.row_bytes]
        tensors[name] = part.view(each.dtype).view(each.num_rows, *each.shape)
        start = _end_of(start, each)
    return tensors


class SharedRows(Offered):
    """Tensors in a file that other processes can map.

    Args:
        file: descriptor, which this object closes.
    """

    def __init__(self, file: int, shapes: Mapping[str, RowShape]) -> None:
        self.file = file
        self.tensors = _map(file, shapes)

    def __del__(self) -> None:
        os.close(self.file)

    def send(self, control: socket.socket) -> None:
        socket.send_fds(control, [b"\0"], [self.file])


class MappedRows(Remote):
    """Mapped tensors of another process."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def write(self, name: str, row: int, content: Tensor) -> None:
        self.tensors[name][row].copy_(content)

    def flush(self) -> None:
        """Does nothing: `write` returns after its copy."""


class SharedMemory(Connector):
    """Shared memory, over sockets that pass file descriptors."""

    def offer(self, shapes: Mapping[str, RowShape]) -> Offered:
        file, size = _open_file(), 0
        for each in shapes.values():
            size = _end_of(size, each)
        os.ftruncate(file, max(size, ALIGNMENT))
        return SharedRows(file, shapes)

    def accept(self, control: socket.socket, shapes: Mapping[str, RowShape]) -> Remote:
        content, files, *_ = socket.recv_fds(control, 1, 1)
        if not content or not files:
            raise EOFError("the other end is closed")
        try:
            return MappedRows(_map(files[0], shapes))
        finally:
            os.close(files[0])


CONNECTORS.register("shared-memory")(SharedMemory())

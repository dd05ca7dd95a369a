"""Interface of what moves memory: the receiver offers memory, senders write rows of it."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.common.registry import Registry


@dataclass(frozen=True, slots=True)
class RowShape:
    """Memory of one name: `num_rows` rows of a shape and a dtype."""

    num_rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Offered(ABC):
    """Memory of this process that senders write.

    Attributes:
        tensors: by name, `[num_rows, *shape]`.
    """

    tensors: Mapping[str, Tensor]

    @abstractmethod
    def send(self, control: socket.socket) -> None:
        """Sends over a connection what `Connector.accept` needs there."""


class Remote(ABC):
    """Memory of a receiver, as a sender sees it."""

    @abstractmethod
    def write(self, name: str, row: int, content: Tensor) -> None:
        """Writes a row, of this process and any device. The receiver may read it once `flush` has returned.

        Raises:
            OSError: the receiver cannot be reached.
        """

    @abstractmethod
    def flush(self) -> None:
        """Waits until all rows are written. Raises OSError as `write` does."""


class Connector(ABC):
    """A way to move memory."""

    def unsupported_reason(self) -> str:
        """Returns why this machine cannot use it; empty if it can."""
        return ""

    @abstractmethod
    def offer(self, shapes: Mapping[str, RowShape]) -> Offered:
        """Allocates memory that senders can write; not initialized."""

    @abstractmethod
    def accept(self, control: socket.socket, shapes: Mapping[str, RowShape]) -> Remote:
        """Receives what `Offered.send` sends. `shapes` are the receiver's. Raises EOFError if the connection ends."""


CONNECTORS: Registry[Connector] = Registry("connector", "runtime.transfer.connectors")

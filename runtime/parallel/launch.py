"""Processes that `torchrun` has started: the first one runs the command, all others join it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.common.errors import ToolkitError

if TYPE_CHECKING:
    from torch.distributed import Store

ADDRESS = "runtime/port"
"""Key of the port at which the first process waits for others, and of a secret, in the store of `torchrun`."""
SECRET_BYTES, INDEX_BYTES = 16, 4
SECONDS_TO_SPEAK = 10.0
"""Time for a connection to say who it is."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A process as the environment variables of `torchrun` describe it.

    Attributes:
        index: its number among `count`; `local_index` among `num_local` of its machine.
        host: address of the machine with the first one.
    """

    index: int
    count: int
    local_index: int
    num_local: int
    host: str

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def accept(self, count: int) -> list[socket.socket]:
        """Returns connections to all other processes, in order. Closes those that do not know the secret: messages of
        the others are unpickled.

        Raises:
            ToolkitError: `count` processes are to share the model, and another number was started.
        """
        if count != self.count:
            raise ToolkitError(
                f"torchrun has started {self.count} processes, and {count} are to share the model",
                "Let --tensor-parallel-size times --pipeline-parallel-size be the number of processes",
            )
        secret, found = secrets.token_bytes(SECRET_BYTES), dict[int, socket.socket]()
        with socket.create_server((self.host, 0)) as server:
            _store().set(ADDRESS, f"{server.getsockname()[1]} {secret.hex()}")
            while len(found) < count - 1:
                connection, _ = server.accept()
                if (index := index_of(connection, secret)) is None:
                    connection.close()
                else:
                    found[index] = connection
        return [found[index] for index in sorted(found)]

    def connect(self) -> socket.socket:
        """Returns a connection to the first process, which it waits for."""
        port, secret = _store().get(ADDRESS).decode().split()
        connection = socket.create_connection((self.host, int(port)))
        connection.sendall(bytes.fromhex(secret) + self.index.to_bytes(INDEX_BYTES))
        return connection


def index_of(connection: socket.socket, secret: bytes) -> int | None:
    """Returns the number of the process at the other end; None for one that does not know the secret."""
    connection.settimeout(SECONDS_TO_SPEAK)
    try:
        said = connection.recv(SECRET_BYTES + INDEX_BYTES, socket.MSG_WAITALL)
    except OSError:
        return None
    connection.settimeout(None)
    return int.from_bytes(said[SECRET_BYTES:]) if hmac.compare_digest(said[:SECRET_BYTES], secret) else None


def _store() -> Store:
    from torch.distributed import rendezvous

    store: Store = next(rendezvous("env://"))[0]
    return store


def find_launch() -> Launch | None:
    """Returns the place of this process among those that `torchrun` has started; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    index, count, local_index, num_local = (int(os.environ[name]) for name in names)
    return Launch(index, count, local_index, num_local, os.environ["MASTER_ADDR"])

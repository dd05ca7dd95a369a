"""Ranks that end before the first one has connected to them: `runtime.ranks:main` of other ends."""

import os
import signal
import socket
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from runtime.engine.wire import receive, send

STATUS = 7


def end_by_status(end: int) -> None:
    """Ends right after it has said that it is ready."""
    connection = socket.socket(fileno=end)
    receive(connection)
    send(connection, None)
    sys.exit(STATUS)


def end_by_signal(end: int) -> None:
    """Ends when it knows the addresses of others and has given none."""
    connection = socket.socket(fileno=end)
    source = receive(connection)
    send(connection, None)
    TCPStore(source.host, source.port, source.config.num_ranks, is_master=False, timeout=timedelta(seconds=30))
    os.kill(os.getpid(), signal.SIGKILL)

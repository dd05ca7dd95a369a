"""Messages over the socket between a server and the process of its engine, and the start of such processes.

Only this toolkit's own process is at the other end, so messages are pickled. Imports nothing that takes time.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from struct import Struct
from typing import Any

LENGTH = Struct("!Q")
READ_BYTES = 2**18


def start_process(call: str, end: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a Python process and hands its end of a socket over; it imports what this process can import.

    Unlike a child of `multiprocessing` it does not import the main module again, which may be anyone's script. Ctrl-C
    is for this process only.

    Args:
        call: `module:function` to call with the file descriptor.
    """
    module, _, function = call.partition(":")
    command = [sys.executable, "-c", f"from {module} import {function}; {function}({end.fileno()})"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with end:
        options: dict[str, Any] = {"pass_fds": (end.fileno(),), "stdin": subprocess.DEVNULL, "env": environment}
        return subprocess.Popen(command, process_group=0, **options)


def leave_signals_to_parent() -> None:
    """Lets signals to end do nothing here: service managers send them to all processes of a server. Processes that this
    one starts heed them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def send(connection: socket.socket, message: Any) -> None:
    """Sends one message. Blocks until the other end has room for it."""
    connection.sendall(frame(message))


def receive(connection: socket.socket) -> Any:
    """Returns the next message. Raises EOFError if the other end is closed."""
    (length,) = LENGTH.unpack(_read_exactly(connection, LENGTH.size))
    return pickle.loads(_read_exactly(connection, length))


def frame(message: Any) -> bytes:
    """Returns a message with its length before it."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(content)) + content


def _read_exactly(connection: socket.socket, size: int) -> bytearray:
    found = bytearray()
    while len(found) < size:
        try:
            part = connection.recv(min(size - len(found), READ_BYTES))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError("the other end is closed")
        found += part
    return found


def describe_end(process: subprocess.Popen[bytes]) -> str:
    """Says how a process ended that has closed its end: `was killed by signal 9`."""
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

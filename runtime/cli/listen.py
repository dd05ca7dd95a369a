"""Binding the port before anything slow happens."""

from __future__ import annotations

import errno
import socket

from compress.checkpoint.errors import ToolkitError

BACKLOG = 2048
PORTS = range(2**16)
PORTS_TO_TRY = 50


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Clients that come while the model loads wait for it.

    Raises:
        ToolkitError: the port is in use or forbidden, or the host is not this machine's.
    """
    if port not in PORTS:
        raise ToolkitError(f"--port {port} is no port", "Use a number from 0 to 65535")
    try:
        return _listen(host, port)
    except socket.gaierror as error:
        raise ToolkitError(f"--host {host} is unknown: {error.strerror}", "Use --host 127.0.0.1 or 0.0.0.0") from error
    except OSError as error:
        raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> ToolkitError:
    match error.errno:
        case errno.EADDRINUSE:
            remedy = f"Stop the server that uses it, or use --port {_free_port(host, port)}"
            return ToolkitError(f"port {port} on {host} is already in use", remedy)
        case errno.EACCES:
            return ToolkitError(f"port {port} needs more rights than this user has", "Use a --port of 1024 or more")
        case errno.EADDRNOTAVAIL:
            return ToolkitError(f"--host {host} is no address of this machine", "Use --host 127.0.0.1 or 0.0.0.0")
        case _:
            return ToolkitError(f"cannot listen on {host}:{port}: {error.strerror}", "Use another --host or --port")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _free_port(host: str, port: int) -> int:
    """The next free port, to be named in a remedy; 0 (any) when there is none near."""
    for candidate in range(port + 1, min(port + PORTS_TO_TRY, PORTS.stop)):
        try:
            _listen(host, candidate).close()
        except OSError:
            continue
        return candidate
    return 0


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""Options of `runtime serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from runtime.cli.options import parse_size


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Where clients reach the server, with which key, and by what name they call the model."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key that clients must send.")] = None
    name: Annotated[str | None, typer.Option("--name", help="Model name for clients; default: the folder's.")] = None


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """What becomes `runtime.server.limits.Limits`, whose names the fields have; the context length comes later."""

    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Running and waiting at most; more get status 429.")
    ] = 256
    max_body_bytes: Annotated[
        int, typer.Option("--max-body", parser=parse_size, metavar="SIZE", help="Longest request body.")
    ] = "4MiB"  # type: ignore[assignment]  # Typer parses defaults too
    queue_seconds: Annotated[
        float, typer.Option("--queue-timeout", min=0.1, help="Seconds until the first token; later is status 503.")
    ] = 600
    request_seconds: Annotated[
        float, typer.Option("--request-timeout", min=0.1, help="Seconds until the last token; later is status 504.")
    ] = 3600
    client_seconds: Annotated[
        float, typer.Option("--client-timeout", min=0.1, help="Seconds for clients to send a request or read on.")
    ] = 30

"""What one server takes on, and how long it waits for whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes on. Times are seconds.

    Attributes:
        max_model_len: tokens of prompt plus output of one sequence.
        max_requests: sequences in flight, running and waiting; more are answered with 429.
        max_body_bytes: longest request body; a longer one is answered with 413.
        queue_seconds: from a request's arrival to its first token; one that waits longer is answered with 503.
        request_seconds: from a request's arrival to its end; one that takes longer is answered with 504, or ends its
            stream with an error.
        client_seconds: for a client to send its body (else 408), or to make room for the next part of a stream it
            does not read (else the connection is closed and the request freed).
    """

    max_model_len: int
    max_requests: int = 256
    max_body_bytes: int = 4 * 2**20
    queue_seconds: float = 600.0
    request_seconds: float = 3600.0
    client_seconds: float = 30.0

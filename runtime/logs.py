"""Logs of a server on a stream, written by a thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any, TextIO

MOST_LINES = 2000


class LogFormatter(logging.Formatter):
    """Log formatter that escapes control characters: text from a request can neither start a line nor reach the
    terminal.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Indents the lines of a traceback, which may contain text from a request."""
        return "\n".join(f"  {escape(line)}" for line in super().formatException(ei).split("\n"))


def escape(text: str) -> str:
    """Returns a line of printable characters; line breaks become `\\n`."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class LogQueue(QueueHandler):
    """Log handler with a writer thread, which keeps a full pipe from blocking the server.

    Lines are dropped while `MOST_LINES` are unwritten.
    """

    queue: SimpleQueue[logging.LogRecord]  # reentrant, because signal handlers also log and may interrupt at any point

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() < MOST_LINES:
            self.queue.put_nowait(record)


@contextmanager
def writing_logs(level: str, stream: TextIO | None = None) -> Iterator[None]:
    """Writes logs to `stream`, by default standard error: those of this package from `level` on, those of libraries
    from WARNING on unless `level` is DEBUG."""
    lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler, writer = LogQueue(lines), QueueListener(lines, logging.StreamHandler(stream))
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel("WARNING" if level == "INFO" else level)
    logging.getLogger("runtime").setLevel(level)
    writer.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        writer.stop()

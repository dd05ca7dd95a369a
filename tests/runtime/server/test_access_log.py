"""One line per request in the log, which no request can forge."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import httpx
import pytest

from runtime.logs import MOST_LINES, LogFormatter, writing_logs

COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 3}
FORGED = "Ann\n2030-01-01 00:00:00 INFO request 0: root GET / 200\r\x1b[2J\u202e\x00\ud800\u2028"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, wait_until: Any) -> Callable[[int], list[str]]:
    """Returns this number of lines, as the server writes them: after the answer, so they may be late."""
    caplog.set_level(logging.INFO, "runtime.server")
    caplog.handler.setFormatter(LogFormatter("%(message)s"))

    def written(count: int) -> list[str]:
        wait_until(lambda: len(caplog.records) >= count)
        return caplog.text.splitlines()

    return written


def test_a_line_per_request_but_none_for_polls(api: httpx.Client, lines: Callable[[int], list[str]]) -> None:
    for path in ("/health", "/metrics", "/v1/models?secret=1"):
        api.get(path)
    answer = api.post("/v1/completions", json={**COMPLETION, "user": "Ann"})
    api.post("/v1/completions", json={**COMPLETION, "stream": True, "n": 2})
    first, second, third = lines(3)
    assert re.fullmatch(r"request \w{32}: 127\.0\.0\.1 GET /v1/models 200 in \d+ ms", first)
    start = f"request {answer.headers['x-request-id']}: 127.0.0.1 POST /v1/completions 200 in "
    assert second.startswith(start)
    assert second.endswith(" ms, 1+3 tokens, user 'Ann'")
    assert third.endswith(" ms, 1+6 tokens")


def test_key_names_are_logged_and_keys_are_not(guarded_api: httpx.Client, lines: Callable[[int], list[str]]) -> None:
    headers = {"Authorization": "Bearer open sesame"}
    guarded_api.post("/v1/completions", json=COMPLETION, headers=headers)
    guarded_api.post("/v1/completions", json=COMPLETION, headers={"Authorization": "Bearer wrong"})
    served, refused = lines(2)
    assert ": default POST /v1/completions 200 " in served
    assert ": 127.0.0.1 POST /v1/completions 401 " in refused
    assert not re.search("sesame|wrong", served + refused)


def test_no_request_writes_lines_or_reaches_the_terminal(api: httpx.Client, lines: Callable[[int], list[str]]) -> None:
    api.post("/v1/completions", json={**COMPLETION, "user": FORGED.replace("\ud800", "")})
    api.get("/v1/%0A2030%1B[2J%E2%80%AE" + "x" * 1000)
    found = lines(2)
    assert len(found) == 2
    for line in found:
        assert line.isprintable()
        assert len(line) < 500


def test_text_in_messages_and_tracebacks_is_escaped() -> None:
    formatter = LogFormatter("%(levelname)s %(message)s")
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("runtime", logging.ERROR, __file__, 1, "failed: %s", (FORGED,), info)
    first, *traceback = formatter.format(record).split("\n")
    assert first.startswith("ERROR failed: Ann\\n2030")
    assert first.isprintable()
    assert all(line.isprintable() and line.startswith("  ") for line in traceback)


class FullPipe(StringIO):
    """Text that cannot be written until `room` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.room = threading.Event()

    def write(self, text: str) -> int:
        assert self.room.wait(60)
        return super().write(text)


@pytest.fixture
def levels() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("runtime")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("levels")
def test_logging_does_not_wait_for_a_full_pipe() -> None:
    pipe, logger = FullPipe(), logging.getLogger("runtime.server")
    with writing_logs("INFO", pipe):
        for number in range(MOST_LINES + 100):
            logger.info("line %d", number)
        pipe.room.set()
    lines = pipe.getvalue().splitlines()
    assert MOST_LINES <= len(lines) <= MOST_LINES + 1  # one is in the writer's hands
    assert lines[0].endswith(" INFO line 0")


@pytest.mark.usefixtures("levels")
@pytest.mark.parametrize(
    ("level", "written"),
    [("ERROR", "x"), ("WARNING", "wWx"), ("INFO", "iwWx"), ("DEBUG", "diwIWx")],
)
def test_levels(level: str, written: str) -> None:
    stream, ours, library = StringIO(), logging.getLogger("runtime.server"), logging.getLogger("uvicorn.error")
    with writing_logs(level, stream):
        ours.debug("d")
        ours.info("i")
        ours.warning("w")
        library.info("I")
        library.warning("W")
        ours.error("x")
    assert "".join(line[-1] for line in stream.getvalue().splitlines()) == written

"""One line per request in the log, which no request can forge."""

import logging
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from runtime.cli.serve import LogFormatter

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

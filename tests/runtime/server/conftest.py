"""A server over a real socket, around an engine that is small enough to see through."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from alphabet import AlphabetEngine, ByteTokenizer
from fastapi import FastAPI
from servers import serving, serving_demo

from runtime.engine.engine import Engine
from runtime.server.app import create_app
from runtime.server.intake import ServedText
from runtime.server.keys import ApiKeys, load_accounts
from runtime.server.serving import Limits
from runtime.text.tokenizer import Tokenizer

LIMITS = Limits(max_model_len=100, max_requests=4, max_body_bytes=10_000)
API_KEY = "open sesame"


@pytest.fixture
def served() -> ServedText:
    """The model that `api` serves, as bodies are checked against it."""
    return ServedText(ByteTokenizer(), "alphabet", LIMITS)


@pytest.fixture(scope="session")
def shared_engine() -> AlphabetEngine:
    return AlphabetEngine()


@pytest.fixture
def engine(shared_engine: AlphabetEngine) -> Iterator[AlphabetEngine]:
    """The engine that serves `api`, as new."""
    yield shared_engine
    shared_engine.reset()


def alphabet_app(
    engine: AlphabetEngine,
    limits: Limits = LIMITS,
    api_key: str | None = None,
    tokenizer: ByteTokenizer | None = None,
    **options: Any,
) -> FastAPI:
    if api_key is not None:
        options["keys"] = ApiKeys(lambda: load_accounts(api_key, None))
    tokenizer = tokenizer or ByteTokenizer()
    return create_app(engine, tokenizer, "alphabet", limits, **options)


@pytest.fixture
def alphabet_parts() -> Callable[..., tuple[FastAPI, AlphabetEngine, ByteTokenizer]]:
    """Makes applications that are not served yet, with engine and tokenizer; takes `alphabet_app`'s options."""

    def make(**options: Any) -> tuple[FastAPI, AlphabetEngine, ByteTokenizer]:
        engine, tokenizer = AlphabetEngine(), ByteTokenizer()
        return alphabet_app(engine, tokenizer=tokenizer, **options), engine, tokenizer

    return make


@pytest.fixture(scope="session")
def new_alphabet_app() -> Callable[..., FastAPI]:
    """Takes `alphabet_app`'s options, for tests that serve the application in their own way."""
    return lambda **options: alphabet_app(AlphabetEngine(), **options)


@pytest.fixture
def serve_alphabet() -> Iterator[Callable[..., tuple[str, AlphabetEngine]]]:
    """Starts servers of their own: takes `alphabet_app`'s options, and returns the URL and the engine."""
    with ExitStack() as servers:

        def serve(**options: Any) -> tuple[str, AlphabetEngine]:
            engine = AlphabetEngine()
            return servers.enter_context(serving(alphabet_app(engine, **options))), engine

        yield serve


@pytest.fixture(scope="session")
def alphabet_url(shared_engine: AlphabetEngine) -> Iterator[str]:
    with serving(alphabet_app(shared_engine)) as url:
        yield url


@pytest.fixture(scope="session")
def guarded_url() -> Iterator[str]:
    with serving(alphabet_app(AlphabetEngine(), api_key=API_KEY)) as url:
        yield url


@pytest.fixture(scope="session")
def demo_server() -> Iterator[tuple[str, Engine, Tokenizer]]:
    """The demo model in float64: URL, engine and tokenizer."""
    with serving_demo(prefill_chunk=32) as served:
        yield served


@pytest.fixture
def api(engine: AlphabetEngine, alphabet_url: str) -> Iterator[httpx.Client]:
    """A client of a server called `alphabet`, without an API key."""
    with httpx.Client(base_url=alphabet_url, timeout=20) as client:
        yield client


@pytest.fixture
def guarded_api(guarded_url: str) -> Iterator[httpx.Client]:
    """A client of the same kind of server with the API key `open sesame`."""
    with httpx.Client(base_url=guarded_url, timeout=20) as client:
        yield client


@pytest.fixture
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which a traceback was logged."""
    yield
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    assert [record.getMessage() for record in records if record.exc_info] == []


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.005)

    return wait

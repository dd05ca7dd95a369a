"""The page in a real browser, served around a scripted engine."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import browser
from playwright.sync_api import expect
from scripted_page import ByteTokens, ScriptedEngine
from servers import serving

from runtime.server.app import create_app
from runtime.server.keys import ApiKeys, load_accounts
from runtime.server.serving import Limits


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser in which assertions wait longer than other work on the machine delays them."""
    with browser() as found:
        expect.set_options(timeout=60_000)
        yield found


@pytest.fixture
def tokens() -> ByteTokens:
    return ByteTokens()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def serve(tokens: ByteTokens, engine: ScriptedEngine) -> Callable[..., Any]:
    def make(api_key: str | None = None) -> Any:
        limits = Limits(max_model_len=2000)
        keys = ApiKeys(lambda: load_accounts(api_key, None)) if api_key else None
        return serving(create_app(engine, tokens, "scripted", limits, keys=keys))

    return make


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[[str], Any]]:
    context = chromium.new_context(viewport={"width": 1000, "height": 700})

    def open_(url: str) -> Any:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("dialog", lambda dialog: pytest.fail(f"the page ran a script: {dialog.message}"))
        page.goto(url)
        return page

    yield open_
    context.close()


@pytest.fixture
def page(serve: Callable[..., Any], open_page: Callable[[str], Any]) -> Iterator[Any]:
    with serve() as url:
        yield open_page(url)

"""The page in a real browser, with answers and failures that a model does not give on demand."""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from scripted_page import MARKUP, ByteTokens, ScriptedEngine, ask

from runtime.engine.engine_client import Health
from runtime.engine.metrics import Metrics, join

SHOWN = MARKUP.replace("  ", " ").replace("\n ", "\n")  # Markdown keeps line ends, and one space of several
API_KEY = "schlüssel 🔑"


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_markup_is_shown_as_text(page: Any, mode: str) -> None:
    page.click("#probabilities")
    page.check(f"input[value={mode}]", force=True)
    turn = ask(page, MARKUP)
    assert turn.locator(".user").inner_text() == (SHOWN if mode == "chat" else MARKUP)
    assert turn.locator(".text").text_content() == MARKUP
    assert page.locator("#log img, #log script, #log b").count() == 0
    spans = turn.locator(".token").all_text_contents()
    assert spans[:5] == ["<", "i", "m", "g", " "]
    assert "<|end|>" not in spans


@pytest.mark.full
def test_characters_of_several_tokens_are_whole(page: Any) -> None:
    page.click("#probabilities")
    turn = ask(page, "say it")
    spans = turn.locator(".token").all_text_contents()
    assert "".join(spans) == MARKUP
    assert {"ü", "🙂", "日", "本"} <= set(spans)


@pytest.mark.full
def test_alternatives_are_shown_as_text(page: Any) -> None:
    page.click("#probabilities")
    turn = ask(page, "say it")
    turn.locator(".token").nth(1).hover()
    assert page.locator("#alternatives th").all_text_contents() == ["i", "<"]
    assert page.locator("#alternatives .percent").all_text_contents() == ["50.0 %", "25.0 %"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "7", "temperature: Input should be less than or equal to 2"),
        ("top_k", "1.5", "top_k: Input should be a valid integer"),
        ("max_tokens", "0", "max_tokens: Input should be greater than or equal to 1"),
    ],
)
def test_bad_value_is_explained_and_shown(page: Any, field: str, value: str, words: str) -> None:
    page.fill(f"#{field}", value)
    turn = ask(page, "hello", ends="failed")
    assert words in turn.locator(".error").inner_text()
    assert page.get_attribute(f"#{field}", "aria-invalid") == "true"
    page.fill(f"#{field}", "1")
    assert page.get_attribute(f"#{field}", "aria-invalid") is None
    page.click("[data-action=again]")
    page.wait_for_selector(".turn[data-state=done]")
    assert turn.locator(".error").is_hidden()


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_answer_without_room_for_max_tokens_fills_the_context(page: Any, mode: str) -> None:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None)
    page.check(f"input[value={mode}]", force=True)
    page.fill("#max_tokens", "1990")
    turn = ask(page, "a question of 30 characters ...")
    assert [body.get("max_tokens") for body in sent] == [1990, None]
    assert "less room" in turn.locator(".note").inner_text()
    assert page.get_attribute("#max_tokens", "aria-invalid") is None


def test_context_that_the_conversation_takes_is_shown(page: Any) -> None:
    page.wait_for_selector("h1:text('scripted')")
    assert page.inner_text("#context") == "2,000 tokens"
    assert page.evaluate("document.querySelector('#used').value") == 0
    ask(page, "hello")
    used = len("hello") + len(MARKUP.encode()) + 1
    assert page.inner_text("#context") == f"{used} of 2,000 tokens"
    assert page.evaluate("document.querySelector('#used').value") == used
    page.reload()
    page.wait_for_selector(f"#context:text('{used} of 2,000')")
    page.click("#new")
    assert page.inner_text("#context") == "2,000 tokens"


def test_failure_within_an_answer_keeps_what_came(page: Any, engine: ScriptedEngine) -> None:
    engine.error = "logits are not finite"
    turn = ask(page, "hello", ends="failed")
    assert "logits are not finite" in turn.locator(".error").inner_text()
    assert turn.locator(".text").inner_text() == SHOWN


@pytest.mark.full
def test_question_without_an_answer_is_not_repeated(page: Any) -> None:
    page.fill("#temperature", "7")
    ask(page, "first", ends="failed")
    page.fill("#temperature", "1")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "second")
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["second"]


@pytest.mark.full
def test_model_without_a_chat_template_continues_text(page: Any, tokens: ByteTokens) -> None:
    tokens.has_template = False
    turn = ask(page, "It was")
    assert "no chat template" in turn.locator(".note").inner_text()
    assert turn.locator(".text").text_content() == MARKUP
    with page.expect_request("**/v1/completions") as sent:
        turn = ask(page, " and then")
    assert sent.value.post_data_json["prompt"] == f"It was{MARKUP} and then"
    assert turn.locator(".note").is_hidden()


def test_key_is_asked_for_and_kept_in_the_tab(serve: Callable[..., Any], open_page: Callable[[str], Any]) -> None:
    with serve(api_key=API_KEY) as url:
        page = open_page(url)
        page.wait_for_selector("#key-form", state="visible")
        page.fill("#key", "wrong")
        page.click("#key-form button")
        page.wait_for_selector("#key-words:text('That key is not accepted.')")
        page.fill("#key", API_KEY)
        page.click("#key-form button")
        page.wait_for_selector("h1:text('scripted')")
        assert page.is_hidden("#key-form")
        assert ask(page, "hello").locator(".text").inner_text() == SHOWN
        page.reload()
        page.wait_for_selector("h1:text('scripted')")
        assert page.is_hidden("#key-form")
        assert page.evaluate("localStorage.length") == 0
        assert page.evaluate("document.cookie") == ""
        other = open_page(url)
        other.wait_for_selector("#key-form", state="visible")


@pytest.mark.full
def test_health_is_shown(page: Any, engine: ScriptedEngine) -> None:
    page.wait_for_selector("#health[data-state=ok]")
    engine.health = Health(False, "no step for 60 s", 1, 0, 60.0)
    page.wait_for_selector("#health[data-state=bad]")
    assert page.inner_text("#health-words") == "unhealthy: no step for 60 s"


@pytest.mark.full
def test_server_that_is_gone_is_told_in_plain_words(serve: Callable[..., Any], open_page: Callable[[str], Any]) -> None:
    with serve() as url:
        page = open_page(url)
        page.wait_for_selector("#health[data-state=ok]")
        page.wait_for_selector("h1:text('scripted')")
    turn = ask(page, "hello", ends="failed")
    assert turn.locator(".error").inner_text() == "The server does not answer. Is it still running?"
    page.wait_for_selector("#health-words:text('not reachable')")


@pytest.mark.full
def test_settings_survive_a_reload_and_can_be_reset(page: Any) -> None:
    page.fill("#temperature", "1.5")
    page.fill("#system", "Be brief.")
    page.reload()
    assert page.input_value("#temperature") == "1.5"
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("[data-slides=temperature]") == "1.5"
    page.click("button[type=reset]")
    assert page.input_value("#temperature") == "0.7"
    assert page.input_value("#system") == ""


@pytest.mark.full
def test_slider_and_number_agree(page: Any) -> None:
    page.fill("#temperature", "1.25")
    assert page.input_value("[data-slides=temperature]") == "1.25"
    page.fill("[data-slides=temperature]", "0.5")
    assert page.input_value("#temperature") == "0.5"


@pytest.mark.full
def test_text_is_copied(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn = ask(page, "hello")
    turn.locator("[data-action=copy]").click()
    page.wait_for_selector("[data-done=Copied]")
    assert page.evaluate("navigator.clipboard.readText()") == MARKUP


@pytest.mark.full
def test_figures_are_those_of_all_engines(engine: ScriptedEngine, serve: Callable[..., Any], open_page: Any) -> None:
    engines = [Metrics(num_requests_running=2, kv_cache_usage_perc=0.2), Metrics(num_requests_running=3)]
    engine.metrics = join(metrics.render("scripted", str(place)) for place, metrics in enumerate(engines))
    with serve() as url:
        page = open_page(url)
        expect(page.locator("[data-figure=running] output")).to_have_text("5")
        expect(page.locator("[data-figure=memory] output")).to_have_text("10 %")

"""The page in a real browser, talking to the bundled demo model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from servers import is_idle, serving_demo

from runtime.engine.engine import Engine

if TYPE_CHECKING:
    from playwright.sync_api import LocatorAssertions


QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have now?"
ENDLESS = "1000000000" * 8  # the demo model never has enough of it
PHONE = {"width": 390, "height": 844}


@dataclass
class Visit:
    """One tab, and what its console complained about."""

    page: Any
    engine: Engine
    complaints: list[str]

    def set(self, **values: object) -> None:
        for name, value in values.items():
            self.page.fill(f"#{name}", str(value))

    def ask(self, text: str) -> Any:
        """Sends a message; returns its turn."""
        self.page.fill("#message", text)
        self.page.keyboard.press("Enter")
        return self.page.locator(".turn").last

    def answer(self, text: str) -> str:
        """The whole answer to a message."""
        self.ask(text)
        return self.ended().locator(".text").inner_text()

    def ended(self) -> Any:
        turn = self.page.locator(".turn").last
        self.page.wait_for_selector(".turn:last-child[data-state=done]", timeout=30_000)
        return turn

    def expect(self, selector: str) -> LocatorAssertions:
        """Assertions that wait until they hold."""
        from playwright.sync_api import expect

        return expect(self.page.locator(selector))

    def figure(self, name: str) -> LocatorAssertions:
        return self.expect(f"[data-figure={name}] output")


@pytest.fixture(scope="module")
def served(chromium: Any) -> Iterator[tuple[str, Engine]]:
    with serving_demo(8, dtype="float32") as (url, engine, _):
        yield url, engine


@pytest.fixture
def visit(chromium: Any, served: tuple[str, Engine], request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A fresh tab on the page, as wide as the test's parameter says."""
    url, engine = served
    context = chromium.new_context(**getattr(request, "param", {"viewport": {"width": 1200, "height": 800}}))
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda note: complaints.append(note.text) if note.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: complaints.append(sent.url) if not sent.url.startswith(url) else None)
    page.goto(url)
    page.wait_for_selector("#health[data-state=ok]")
    try:
        yield Visit(page, engine, complaints)
    finally:
        context.close()
    assert complaints == []


@pytest.mark.full
def test_model_and_context_are_shown(visit: Visit) -> None:
    visit.page.wait_for_selector("h1:text('demo')")
    assert visit.page.title() == "demo"
    assert f"{visit.engine.runner.max_model_len:,} tokens" in visit.page.inner_text("#context")


@pytest.mark.full
def test_answer_grows_while_it_is_made(visit: Visit) -> None:
    visit.set(max_tokens=300, seed=1)
    turn = visit.ask(QUESTION)
    lengths = set()
    while turn.get_attribute("data-state") == "running":
        lengths.add(len(turn.locator(".text").inner_text()))
    visit.ended()
    assert len(lengths) > 3
    assert max(lengths) > min(lengths)
    assert re.search(r"\d+ tokens · \d+ tokens/s · first after \d", turn.locator(".facts").inner_text())


@pytest.mark.full
def test_nothing_jumps_while_an_answer_comes(visit: Visit) -> None:
    visit.page.evaluate(
        """window.shifts = [];
        new PerformanceObserver(list => shifts.push(...list.getEntries().map(entry => entry.value)))
            .observe({type: "layout-shift"})"""
    )
    visit.set(max_tokens=300, seed=1)
    composer = visit.page.locator("#composer").bounding_box()
    visit.answer(QUESTION)
    assert visit.page.locator("#composer").bounding_box() == composer
    assert max(visit.page.evaluate("shifts")) < 0.03  # the line under the answer, going down with it


def test_answer_is_the_one_of_the_api(visit: Visit, served: tuple[str, Engine]) -> None:
    visit.page.click("#probabilities")  # the text as it came, not as Markdown
    visit.set(temperature=0, max_tokens=40, system="Be brief.", repetition_penalty=1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    first = visit.page.text_content(".text") if visit.answer(QUESTION) else ""
    body = {"model": "demo", "temperature": 0, "max_tokens": 40}

    def asked() -> str:
        response = httpx.post(f"{served[0]}/v1/chat/completions", json={**body, "messages": messages}, timeout=30)
        return response.json()["choices"][0]["message"]["content"]

    assert first == asked()
    visit.answer("And then?")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    assert visit.page.locator(".text").last.text_content() == asked()


@pytest.mark.full
def test_sampling_settings_reach_the_server(visit: Visit) -> None:
    visit.set(temperature=1.2, top_p=0.9, top_k=50, min_p=0.01, max_tokens=8, seed=5)
    visit.set(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask(QUESTION)
    body = sent.value.post_data_json
    wanted = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "max_tokens": 8, "seed": 5}
    wanted |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    assert {name: body[name] for name in wanted} == wanted
    visit.ended()


@pytest.mark.full
def test_same_seed_again_gives_the_same_answer(visit: Visit) -> None:
    visit.set(seed=3, max_tokens=30)
    first = visit.answer(QUESTION)
    visit.page.click("[data-action=again]")
    visit.ended()
    assert visit.page.inner_text(".text") == first
    visit.set(seed=4)
    visit.page.click("[data-action=again]")
    visit.ended()
    assert visit.page.inner_text(".text") != first
    assert visit.page.locator(".turn").count() == 1


@pytest.mark.full
def test_pointing_at_a_token_shows_its_alternatives(visit: Visit) -> None:
    visit.page.click("#probabilities")
    visit.set(temperature=0, max_tokens=20)
    visit.answer(QUESTION)
    token = visit.page.locator(".token").nth(3)
    token.hover()
    panel = visit.page.locator("#alternatives")
    assert panel.is_visible()
    rows = panel.locator("tr")
    assert rows.count() == 8
    percents = [float(text.removesuffix("%").strip(" <")) for text in panel.locator(".percent").all_inner_texts()]
    assert percents == sorted(percents, reverse=True)
    chosen = panel.locator("tr.chosen th")
    assert chosen.inner_text().replace("·", " ") == token.text_content()
    assert rows.first.get_attribute("class") == "chosen"  # a greedy token is the most likely one
    assert token.get_attribute("aria-describedby") == panel.get_attribute("id")
    visit.page.hover("#message")
    assert panel.is_hidden()


@pytest.mark.full
def test_tokens_are_reached_with_the_keyboard(visit: Visit) -> None:
    visit.page.click("#probabilities")
    visit.set(temperature=0, max_tokens=10)
    visit.answer(QUESTION)
    visit.page.locator("#message").focus()
    for _ in range(5):  # past the button for files and those under the answer
        visit.page.keyboard.press("Shift+Tab")
    tokens = visit.page.locator(".token")
    focused = "document.activeElement.textContent"
    assert visit.page.evaluate(focused) == tokens.nth(0).text_content()
    assert visit.page.locator("#alternatives").is_visible()
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.evaluate(focused) == tokens.nth(1).text_content()
    visit.page.keyboard.press("End")
    assert visit.page.evaluate(focused) == tokens.last.text_content()
    visit.page.keyboard.press("Escape")
    assert visit.page.locator("#alternatives").is_hidden()


@pytest.mark.full
def test_probabilities_are_asked_for_and_shown_when_switched_on(visit: Visit) -> None:
    visit.set(seed=1, max_tokens=20, temperature=1)
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.answer(QUESTION)
    assert "logprobs" not in sent.value.post_data_json
    assert visit.page.locator(".token").count() == 0
    visit.page.click("#probabilities")
    assert visit.page.locator(".token").count() == 0  # those of earlier answers are not known
    visit.page.click("[data-action=again]")
    visit.ended()
    colours = "[...document.querySelectorAll('.token')].map(t => getComputedStyle(t).backgroundColor)"
    assert len(set(visit.page.evaluate(colours))) > 3
    visit.page.click("#probabilities")
    assert visit.page.evaluate(colours) == []


@pytest.mark.full
def test_stop_ends_a_long_answer_and_frees_it(visit: Visit, wait_until: Callable[..., None]) -> None:
    visit.set(max_tokens=1800, temperature=0)
    visit.page.check("input[value=text]", force=True)
    turn = visit.ask(ENDLESS)
    visit.expect(".turn .text").to_have_text(re.compile(".{6}"))
    assert visit.page.inner_text("#send") == "Stop"
    visit.page.click("#send")
    visit.ended()
    assert "stopped" in turn.locator(".facts").inner_text()
    wait_until(lambda: is_idle(visit.engine))
    visit.figure("running").to_have_text("0")
    length = len(turn.locator(".text").inner_text())
    assert length > 0
    visit.page.wait_for_timeout(100)
    assert len(turn.locator(".text").inner_text()) == length


@pytest.mark.full
def test_figures_move(visit: Visit) -> None:
    visit.figure("running").to_have_text("0")
    visit.figure("waiting").to_have_text("0")
    visit.set(max_tokens=1800, temperature=0)
    visit.page.check("input[value=text]", force=True)
    visit.ask(ENDLESS)
    visit.figure("running").to_have_text("1")
    visit.figure("speed").to_have_text(re.compile("[1-9]"))
    visit.figure("memory").to_have_text(re.compile("[1-9].* %"))
    visit.figure("drafts").to_have_text("–")
    visit.expect("[data-figure=running] .line").to_have_attribute("d", re.compile(r",31\.0L.*,1\.0$"))  # 0, then 1
    visit.page.click("#send")
    visit.ended()
    visit.set(max_tokens=1)
    visit.page.click("#new")
    visit.answer(ENDLESS)
    visit.figure("prefix").to_have_text(re.compile("[1-9].* %"))
    visit.figure("running").to_have_text("0")


@pytest.mark.full
def test_new_conversation_forgets_the_old_one(visit: Visit) -> None:
    visit.set(max_tokens=5)
    visit.answer(QUESTION)
    visit.page.click("#new")
    assert visit.page.locator(".turn").count() == 0
    assert visit.page.is_visible(".welcome")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.answer("Hello")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Hello"}]


@pytest.mark.full
@pytest.mark.parametrize("visit", [{"viewport": PHONE, "has_touch": True, "is_mobile": True}], indirect=True)
def test_phone(visit: Visit) -> None:
    page = visit.page
    assert page.is_hidden("#settings")
    page.tap("[aria-controls=side]")
    page.wait_for_selector("#settings", state="visible")
    visit.set(max_tokens=60)
    page.tap("#side .close")
    page.tap("#probabilities")
    page.wait_for_selector("#settings", state="hidden")
    page.fill("#message", QUESTION)
    page.tap("#send")
    visit.ended()
    page.locator(".token").nth(5).tap()
    box = page.locator("#alternatives").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


CONTROLS = """[...document.querySelectorAll("button, input:not([type=file]), textarea, summary")]
    .map(element => element.type === "radio" ? element.labels[0] : element)
    .filter(element => element.checkVisibility({visibilityProperty: true, opacityProperty: true}))
    .map(element => {
        const {width, height} = element.getBoundingClientRect();
        const label = element.ariaLabel || element.labels?.[0]?.textContent || element.textContent;
        return {html: element.outerHTML.slice(0, 80), label: label.trim(), width, height};
    })"""


@pytest.mark.full
@pytest.mark.parametrize("visit", [{"viewport": PHONE, "has_touch": True, "is_mobile": True}], indirect=True)
def test_controls_of_a_phone_are_large_and_have_a_label(visit: Visit) -> None:
    page = visit.page
    page.tap("[aria-controls=side]")
    visit.set(max_tokens=10)
    page.tap("#side .close")
    found = page.evaluate(CONTROLS)
    page.set_input_files("#composer input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"x"})
    page.fill("#message", "```\ncode\n```")
    found += page.evaluate(CONTROLS)
    page.tap("#send")
    visit.ended()
    page.tap("[data-action=again]")
    visit.ended()
    found += page.evaluate(CONTROLS)
    page.tap("[data-action=edit]")
    found += page.evaluate(CONTROLS)
    page.tap("[data-action=cancel]")
    for drawer in ("kept", "side"):
        page.tap(f"[aria-controls={drawer}]")
        page.wait_for_selector(f"#{drawer}", state="visible")
        page.evaluate("document.querySelector('.form').open = true")
        found += page.evaluate(CONTROLS)
        page.tap(f"#{drawer} .close")
    assert len({control["label"] for control in found}) > 30
    assert [control for control in found if not control["label"]] == []
    assert [control for control in found if min(control["width"], control["height"]) < 43.9] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.full
def test_long_conversation_ends_with_the_context(visit: Visit) -> None:
    visit.set(max_tokens=600, temperature=0)
    context = visit.engine.runner.max_model_len
    used = 0
    while used < context - 100:
        visit.answer(QUESTION * 10)
        used = visit.page.evaluate("document.querySelector('#used').value")
    assert used <= context
    assert "less room" in visit.ended().locator(".note").inner_text()
    assert all("400 (Bad Request)" in complaint for complaint in visit.complaints)  # one for each shorter answer
    visit.complaints.clear()


@pytest.mark.full
@pytest.mark.parametrize("visit", [{"color_scheme": scheme} for scheme in ("light", "dark")], indirect=True)
def test_text_is_readable_in_light_and_dark(visit: Visit) -> None:
    colours = "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.documentElement))"
    ink, paper = (luminance(colour) for colour in visit.page.evaluate(colours))
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, 0 to 1, as the accessibility guidelines define it."""
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

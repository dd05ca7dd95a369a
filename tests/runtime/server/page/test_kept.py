"""Kept conversations and their branches, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from scripted_page import ScriptedEngine, ask, ended, wait_until_kept

pytestmark = pytest.mark.full


def titles(page: Any) -> list[str]:
    return page.locator("#kept .open").all_text_contents()


def messages(page: Any) -> list[str]:
    return page.locator(".user").all_inner_texts()


def answers(page: Any) -> list[str]:
    return page.locator(".turn .text").all_inner_texts()


@pytest.fixture
def wide_page(page: Any) -> Any:
    """Wide enough for the list to be next to the conversation."""
    page.set_viewport_size({"width": 1300, "height": 800})
    return page


def test_conversation_survives_a_reload(wide_page: Any, engine: ScriptedEngine) -> None:
    page = wide_page
    engine.answer = "<think>so</think>*one*"
    ask(page, "first question")
    ask(page, "second question")
    page.reload()
    expect(page.locator(".user")).to_have_text(["first question", "second question"])
    assert answers(page) == ["one", "one"]
    assert page.locator(".turn").first.locator(".thoughts").text_content() == "so"
    assert re.search(r"\d+ tokens", page.locator(".facts").last.inner_text())
    assert titles(page) == ["first question"]
    assert page.locator("#kept [aria-current]").count() == 1
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "third question")
    contents = [message["content"] for message in sent.value.post_data_json["messages"]]
    assert contents == ["first question", "*one*", "second question", "*one*", "third question"]


@pytest.mark.full
def test_conversations_are_listed_and_opened(wide_page: Any, engine: ScriptedEngine) -> None:
    page = wide_page
    engine.answer = "yes"
    ask(page, "older")
    page.click("#new")
    assert page.is_visible(".welcome")
    ask(page, "newer")
    expect(page.locator("#kept .open")).to_have_text(["newer", "older"])
    page.click("#kept .open:text('older')")
    expect(page.locator(".user")).to_have_text(["older"])
    assert page.locator("#kept [aria-current]").text_content() == "older"
    ask(page, "again")
    expect(page.locator("#kept .open")).to_have_text(["older", "newer"])  # the last used is the first


def test_conversations_are_searched_by_title_message_file_and_answer(wide_page: Any, engine: ScriptedEngine) -> None:
    page = wide_page
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"wine list"}
    for question, engine.answer in (("apples", "Red or GREEN."), ("pears", "none")):
        page.click("#new")
        if question == "pears":
            page.set_input_files("#composer input[type=file]", file)
            expect(page.locator("#attached li")).to_have_count(1)
        ask(page, question)
    results = {"Apples": ["apples"], "green": ["apples"], "wine": ["pears"], "e": ["pears", "apples"]}
    for query, found in results.items():
        page.fill("#kept input[type=search]", query)
        expect(page.locator("#kept .open")).to_have_text(found)
    page.fill("#kept input[type=search]", "nowhere")
    expect(page.locator("#kept .open")).to_have_count(0)
    page.fill("#kept input[type=search]", "")
    expect(page.locator("#kept .open")).to_have_count(2)


@pytest.mark.full
def test_conversation_is_renamed(wide_page: Any) -> None:
    page = wide_page
    ask(page, "some question")
    page.click("#kept [data-action=rename]")
    page.keyboard.type("Apples <b>")
    page.keyboard.press("Enter")
    expect(page.locator("#kept .open")).to_have_text(["Apples <b>"])
    page.click("#kept [data-action=rename]")
    page.keyboard.type("Pears")
    page.keyboard.press("Escape")
    assert titles(page) == ["Apples <b>"]
    ask(page, "more")
    page.reload()
    expect(page.locator("#kept .open")).to_have_text(["Apples <b>"])
    assert page.get_attribute("#kept [data-action=delete]", "aria-label") == "Delete: Apples <b>"


@pytest.mark.full
def test_conversation_is_deleted_at_the_second_click(wide_page: Any) -> None:
    page = wide_page
    ask(page, "keep me")
    page.click("#new")
    ask(page, "delete me")
    button = page.locator("#kept li", has_text="delete me").locator("[data-action=delete]")
    button.click()
    assert button.get_attribute("aria-label") == "Click again to delete: delete me"
    page.focus("#message")
    assert button.get_attribute("aria-label") == "Delete: delete me"
    assert len(titles(page)) == 2
    button.click()
    button.click()
    expect(page.locator("#kept .open")).to_have_text(["keep me"])
    assert page.is_visible(".welcome")
    wait_until_kept(page)
    page.reload()
    expect(page.locator("#kept .open")).to_have_text(["keep me"])
    assert page.locator(".turn").count() == 0


def test_editing_and_regenerating_make_versions(page: Any, engine: ScriptedEngine) -> None:
    engine.answer = "a1"
    ask(page, "q1")
    engine.answer = "a2"
    first = ask(page, "q2").locator("xpath=preceding-sibling::*[1]")
    assert page.locator(".versions:visible").count() == 0
    engine.answer = "a1 again"
    first.locator("[data-action=again]").click()
    ended(page)
    assert (messages(page), answers(page)) == (["q1"], ["a1 again"])
    assert page.inner_text(".version") == "2 / 2"
    engine.answer = "a1 edited"
    page.click("[data-action=edit]")
    page.fill(".edit textarea", "q1 edited")
    page.keyboard.press("Enter")
    ended(page)
    assert (messages(page), answers(page)) == (["q1 edited"], ["a1 edited"])
    assert page.inner_text(".version") == "3 / 3"
    assert page.is_disabled("[data-action=next]")
    page.click("[data-action=previous]")
    page.keyboard.press("Enter")  # the button of the other version has the focus
    assert (messages(page), answers(page)) == (["q1", "q2"], ["a1", "a2"])
    assert page.is_disabled("[data-action=previous] >> nth=0")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "q3")
    contents = [message["content"] for message in sent.value.post_data_json["messages"]]
    assert contents == ["q1", "a1", "q2", "a2", "q3"]


@pytest.mark.full
def test_shown_versions_are_kept(page: Any, engine: ScriptedEngine) -> None:
    ask(page, "q1")
    engine.answer = "other"
    page.click("[data-action=again]")
    ended(page)
    page.click("[data-action=previous]")
    shown = answers(page)
    wait_until_kept(page)
    page.reload()
    expect(page.locator(".version")).to_have_text("1 / 2")
    assert answers(page) == shown


@pytest.mark.full
def test_edit_is_cancelled(page: Any) -> None:
    ask(page, "q1")
    for cancel in (lambda: page.keyboard.press("Escape"), lambda: page.click("[data-action=cancel]")):
        page.click("[data-action=edit]")
        page.keyboard.type("changed")
        cancel()
        assert page.locator(".edit").count() == 0
        assert page.locator(".user").is_visible()
    assert messages(page) == ["q1"]
    assert page.evaluate("document.activeElement.dataset.action") == "edit"


@pytest.mark.full
def test_failed_answer_is_replaced_not_branched(page: Any) -> None:
    page.fill("#temperature", "7")
    ask(page, "q1", ends="failed")
    page.fill("#temperature", "1")
    page.click("[data-action=again]")
    ended(page)
    assert page.locator(".versions:visible").count() == 0


@pytest.mark.full
def test_export_and_import_bring_everything_back(
    wide_page: Any, engine: ScriptedEngine, open_page: Callable[[str], Any], tmp_path: Path
) -> None:
    page = wide_page
    ask(page, "q1")
    engine.answer = "other"
    page.click("[data-action=again]")
    ended(page)
    page.click("#new")
    ask(page, "second conversation")
    with page.expect_download() as one:
        page.locator("#kept li", has_text="q1").hover()
        page.locator("#kept li", has_text="q1").locator("[data-action=export]").click()
    assert one.value.suggested_filename == "q1.json"
    with page.expect_download() as all_of_them:
        page.click("#export-all")
    path = tmp_path / "conversations.json"
    all_of_them.value.save_as(path)
    exported = json.loads(path.read_text())
    assert sorted(found["title"] for found in exported["conversations"]) == ["q1", "second conversation"]
    for number in (2, 1):
        page.locator("#kept li").first.hover()
        page.locator("#kept [data-action=delete]").first.click(click_count=2)
        expect(page.locator("#kept .open")).to_have_count(number - 1)
    page.set_input_files("#kept input[type=file]", path)
    expect(page.locator(".kept-note")).to_have_text("Imported 2 conversations.")
    page.click("#kept .open:text('q1')")
    expect(page.locator(".version")).to_have_text("2 / 2")
    assert answers(page) == ["other"]
    page.set_input_files("#kept input[type=file]", path)
    expect(page.locator("#kept .open")).to_have_count(4)  # an import replaces nothing


TURN = {"id": "a", "parent": "", "user": "hello"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no JSON", "not valid JSON"),
        ("[]", "has no conversations"),
        ({"version": 9}, "version 9"),
        ({"conversations": 3}, '"conversations" in the file must be a list'),
        ({"conversations": [{"title": 1, "turns": []}]}, '"title" in the file must be text'),
        ({"conversations": [{"title": "x", "turns": [{**TURN, "user": {}}]}]}, '"user" in the file must be text'),
        ({"conversations": [{"title": "x", "turns": [{**TURN, "tokens": "3"}]}]}, '"tokens" in the file must be a'),
        ({"conversations": [{"title": "x", "turns": [{**TURN, "parent": "b"}]}]}, "not in front of it"),
        ({"conversations": [{"title": "x", "turns": [TURN, TURN]}]}, "the same id"),
    ],
)
def test_damaged_file_is_refused_whole(wide_page: Any, content: Any, words: str) -> None:
    if isinstance(content, dict):
        content = json.dumps({"format": "runtime.conversations", "version": 1, "conversations": []} | content)
    file = {"name": "x.json", "mimeType": "application/json", "buffer": content.encode()}
    wide_page.set_input_files("#kept input[type=file]", file)
    expect(wide_page.locator(".kept-note")).to_contain_text(words)
    assert titles(wide_page) == []


@pytest.mark.full
def test_imported_answer_is_harmless_too(wide_page: Any) -> None:
    hostile = "<img src=x onerror='window.hacked = 1'> [x](javascript:window.hacked=2)"
    turn = {**TURN, "user": hostile, "content": hostile, "reasoning": hostile, "error": hostile, "facts": hostile}
    content = {"title": hostile, "turns": [turn], "chosen": {"__proto__": "a", "": "a"}}
    archive = {"format": "runtime.conversations", "version": 1, "conversations": [content]}
    file = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(archive).encode()}
    wide_page.set_input_files("#kept input[type=file]", file)
    wide_page.click("#kept .open")
    expect(wide_page.locator(".user")).to_have_text(["<img src=x onerror='window.hacked = 1'> x"])
    assert wide_page.locator("#log img, #kept img").count() == 0
    assert wide_page.evaluate("window.hacked") is None


@pytest.mark.full
def test_opening_another_conversation_stops_the_answer_and_keeps_it(wide_page: Any) -> None:
    page = wide_page
    ask(page, "other")
    page.click("#new")
    answer = 'data: {"choices": [{"index": 0, "delta": {"content": "part"}, "finish_reason": null}]}\n\n'
    page.evaluate(
        """text => { window.fetch = async (path, {signal}) => new Response(new ReadableStream({start(controller) {
            controller.enqueue(new TextEncoder().encode(text));
            signal.addEventListener("abort", () => controller.error(signal.reason));
        }})); }""",
        answer,
    )
    page.fill("#message", "long one")
    page.click("#send")
    expect(page.locator(".turn .text")).to_have_text("part")
    page.click("#kept .open:text('other')")
    expect(page.locator(".user")).to_have_text(["other"])
    page.click("#kept .open:text('long one')")
    expect(page.locator(".turn .text")).to_have_text("part")
    assert "stopped" in page.inner_text(".facts")


@pytest.mark.full
def test_page_works_where_the_browser_keeps_nothing(serve: Callable[..., Any], open_page: Callable[[str], Any]) -> None:
    with serve() as url:
        page = open_page(url)
        page.add_init_script("IDBFactory.prototype.open = () => { throw new Error('storage is forbidden') }")
        page.reload()
        ask(page, "hello")
        assert page.text_content(".kept-note") == "storage is forbidden"


@pytest.mark.full
def test_list_is_a_drawer_on_narrow_screens(page: Any) -> None:
    ask(page, "hello")
    assert page.is_hidden("#kept")
    page.click("[aria-controls=kept]")
    page.wait_for_selector("#kept .open", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#kept .open", state="hidden")

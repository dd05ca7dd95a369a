"""Attached files, JSON schemas and tools of the page, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import expect
from scripted_page import ScriptedEngine, ask, ended, wait_until_kept

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "<b>Rome</b>"}}</tool_call>'
TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'


def attach(page: Any, name: str, content: bytes) -> None:
    file = {"name": name, "mimeType": "application/octet-stream", "buffer": content}
    page.set_input_files("#composer input[type=file]", file)


def fill_form(page: Any, **values: str) -> None:
    page.click(".form summary")
    for name, value in values.items():
        page.fill(f"#{name}", value)


@pytest.mark.full
def test_text_file_goes_into_the_message(page: Any, engine: ScriptedEngine) -> None:
    engine.answer = "fine"
    attach(page, "notes.md", b"# Notes\n```\ncode\n```\n")
    expect(page.locator("#attached summary")).to_have_text(["notes.md · 21 B"])
    with page.expect_request("**/v1/chat/completions") as sent:
        turn = ask(page, "Summarize <b>this</b>.")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert content == "notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nSummarize <b>this</b>."
    assert page.locator("#attached li").count() == 0
    turn.locator(".files summary").click()
    assert turn.locator(".files pre").text_content() == "# Notes\n```\ncode\n```\n"
    page.reload()
    expect(page.locator(".turn .files summary")).to_have_text(["notes.md · 21 B"])
    page.click("[data-action=edit]")
    page.fill(".edit textarea", "Shorter.")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json["messages"][0]["content"] == content.replace("Summarize <b>this</b>.", "Shorter.")


@pytest.mark.full
def test_file_alone_is_a_message_and_can_be_taken_back(page: Any) -> None:
    assert page.is_disabled("#send")
    attach(page, "a.txt", "grüße".encode())
    attach(page, "b.txt", b"second")
    expect(page.locator("#attached li")).to_have_count(2)
    page.click("[aria-label='Remove b.txt']")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#send")
    assert sent.value.post_data_json["messages"][0]["content"] == "a.txt:\n```\ngrüße\n```"
    ended(page)
    assert page.locator(".user").is_hidden()


@pytest.mark.full
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n\x1a\n\xff", "picture is not a text in UTF-8"),
        (b"text\0with zero", "picture is not a text in UTF-8"),
        (b"a" * (1024**2 + 1), "picture has 1048577 bytes; files of at most 1 MiB can be attached."),
    ],
)
def test_file_that_is_no_text_or_too_long_is_refused(page: Any, content: bytes, words: str) -> None:
    attach(page, "picture", content)
    expect(page.locator("#refused")).to_contain_text(words)
    assert page.locator("#attached li").count() == 0
    attach(page, "text", b"fine")
    expect(page.locator("#attached li")).to_have_count(1)
    assert page.text_content("#refused") == ""


@pytest.mark.parametrize("media_type", ["image/png", "image/svg+xml", "audio/wav"])
def test_image_is_refused_when_it_is_attached_or_pasted(page: Any, media_type: str) -> None:
    page.set_input_files("#composer input[type=file]", {"name": "cat.x", "mimeType": media_type, "buffer": b"<svg/>"})
    expect(page.locator("#refused")).to_have_text("cat.x cannot be attached: the model reads text only.")
    attach(page, "text", b"fine")
    expect(page.locator("#refused")).to_have_text("")
    page.evaluate(
        """type => {
            const data = new DataTransfer();
            data.items.add(new File(["<svg/>"], "pasted.x", {type}));
            const paste = new ClipboardEvent("paste", {clipboardData: data, bubbles: true});
            document.querySelector("#message").dispatchEvent(paste);
        }""",
        media_type,
    )
    expect(page.locator("#refused")).to_contain_text("pasted.x cannot be attached")
    assert page.locator("#attached li").count() == 1


@pytest.mark.full
def test_schema_reaches_the_server(page: Any) -> None:
    fill_form(page, response_format=json.dumps(SCHEMA))
    with page.expect_request("**/v1/chat/completions") as sent:
        page.fill("#message", "hello")
        page.click("#send")
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    assert sent.value.post_data_json["response_format"] == wanted
    assert "tools" not in sent.value.post_data_json


@pytest.mark.full
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("response_format", '{"type": }', "JSON schema of the answer: not valid JSON"),
        ("response_format", "[]", "JSON schema of the answer: must be a JSON object"),
        ("response_format", "null", "JSON schema of the answer: must be a JSON object"),
        ("tools", "{}", "Tools: must be a JSON list"),
    ],
)
def test_broken_json_is_told_and_not_sent(page: Any, field: str, value: str, words: str) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    fill_form(page, **{field: value})
    page.focus("#message")
    assert page.get_attribute(f"#{field}", "aria-invalid") == "true"
    assert page.text_content(f"#{field}_problem") in words + page.text_content(f"#{field}_problem")
    turn = ask(page, "hello", ends="failed")
    assert words in turn.locator(".error").inner_text()
    assert not [url for url in sent if url.endswith("completions")]
    page.fill(f"#{field}", "")
    assert page.get_attribute(f"#{field}", "aria-invalid") is None
    page.click("[data-action=again]")
    ended(page)


@pytest.mark.full
def test_refusal_of_a_tool_points_at_the_field(page: Any) -> None:
    fill_form(page, tools='[{"type": "function", "function": {"name": "no spaces allowed"}}]')
    page.click(".form summary")
    turn = ask(page, "hello", ends="failed")
    assert "tools" in turn.locator(".error").inner_text()
    assert page.get_attribute("#tools", "aria-invalid") == "true"
    assert page.is_visible("#tools")


@pytest.mark.full
def test_calls_are_shown_and_results_continue_the_conversation(page: Any, engine: ScriptedEngine) -> None:
    fill_form(page, tools=json.dumps(TOOLS))
    engine.answer = TWO_CALLS
    with page.expect_request("**/v1/chat/completions") as sent:
        turn = ask(page, "What is the weather?")
    assert sent.value.post_data_json["tools"] == TOOLS
    assert turn.locator(".text").inner_text().strip() == "Let me see."
    assert turn.locator(".call .name").all_text_contents() == ["weather", "now"]
    assert json.loads(turn.locator(".call pre").first.text_content()) == {"city": "<b>Rome</b>"}
    page.fill("#message", "and?")
    page.keyboard.press("Enter")  # leads to the results that are missing
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Result of weather"
    assert page.input_value("#message") == "and?"
    page.fill("[aria-label='Result of weather']", "sunny")
    page.fill("[aria-label='Result of now']", "12:00")
    engine.answer = "It is sunny."
    with page.expect_request("**/v1/chat/completions") as sent:
        turn.locator(".calls button").click()
    ended(page)
    question, call, weather, now = sent.value.post_data_json["messages"]
    assert question == {"role": "user", "content": "What is the weather?"}
    assert [found["function"]["name"] for found in call["tool_calls"]] == ["weather", "now"]
    assert call["content"].strip() == "Let me see."
    ids = [found["id"] for found in call["tool_calls"]]
    assert weather == {"role": "tool", "tool_call_id": ids[0], "content": "sunny"}
    assert now == {"role": "tool", "tool_call_id": ids[1], "content": "12:00"}
    assert page.locator(".text").last.inner_text() == "It is sunny."
    assert page.locator(".results dd").all_text_contents() == ["sunny", "12:00"]
    assert page.locator(".calls textarea:visible").count() == 0
    page.reload()
    expect(page.locator(".results dd")).to_have_text(["sunny", "12:00"])
    assert page.locator(".call .name").all_text_contents() == ["weather", "now"]


@pytest.mark.full
def test_other_results_make_a_version(page: Any, engine: ScriptedEngine) -> None:
    fill_form(page, tools=json.dumps(TOOLS))
    engine.answer = CALL
    ask(page, "What is the weather?")
    engine.answer = "sunny"
    page.fill("[aria-label='Result of weather']", "first")
    page.click(".calls button")
    ended(page)
    page.locator(".turn").last.locator("[data-action=edit]").click()
    assert page.input_value("[aria-label='Result of weather']") == "first"
    page.fill("[aria-label='Result of weather']", "second")
    page.click(".calls button >> visible=true")
    expect(page.locator(".version").last).to_have_text("2 / 2")
    ended(page)
    assert page.locator(".results dd").all_text_contents() == ["second"]
    page.locator(".turn").last.locator("[data-action=previous]").click()
    assert page.locator(".results dd").all_text_contents() == ["first"]
    wait_until_kept(page)


@pytest.mark.full
def test_call_that_comes_in_parts_is_put_together(page: Any) -> None:
    parts = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
    ]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None}]} for part in parts]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    turn = ask(page, "hello")
    assert turn.locator(".call .name").all_text_contents() == ["weather"]
    assert json.loads(turn.locator(".call pre").text_content()) == {"city": "Rome"}


@pytest.mark.full
def test_form_survives_a_reload_and_can_be_reset(page: Any) -> None:
    fill_form(page, tools=json.dumps(TOOLS), response_format="{")
    page.reload()
    assert page.input_value("#tools") == json.dumps(TOOLS)
    assert page.get_attribute("#response_format", "aria-invalid") == "true"
    page.click("button[type=reset]")
    assert page.input_value("#tools") == page.input_value("#response_format") == ""
    assert page.get_attribute("#response_format", "aria-invalid") is None

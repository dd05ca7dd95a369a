"""Markdown and reasoning of answers in a real browser: readable when it is meant well, harmless when it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_page import ScriptedEngine, ask

ARTICLE = """# Title

A *short* **text** with `code` and a [link](https://example.org/a?b=1&c=2 "title").
Second line.

1. one
2. two
   - inner

| a | b |
|---|--:|
| 1 | 2 |

- [x] done

> quoted

```python
def f(x):
    return "<b>" + x  # comment
```

last"""
HOSTILE = """<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 2"> <b onmouseover=window.hacked=3>hover</b>

[click](javascript:window.hacked=4) [data](data:text/html,<script>window.hacked=5</script>)
[vb](vbscript:x) [coded](&#106;avascript:window.hacked=6) [relative](/v1/models) <javascript:window.hacked=7>

![picture](https://example.org/secret.png) ![x](x" onerror="window.hacked=8)

<iframe src="javascript:window.hacked=9"></iframe><style>body { display: none }</style>
<svg onload="window.hacked=10"></svg><form action="https://example.org"><input name="body"></form>
<a id="turn" name="message" style="position: fixed; inset: 0">x</a><base href="https://example.org/">
<meta http-equiv="refresh" content="0; url=https://example.org/"><math><mtext></p><style><img src=x onerror=alert(1)>

[a"onmouseover="window.hacked=11](https://example.org/"onmouseover="window.hacked=12)

```html" onmouseover="window.hacked=13
<script>window.hacked = 14</script><img src=x onerror="window.hacked = 15">
```

```html
<script>window.hacked = 16</script><img src=x onerror="window.hacked = 17">
```
"""
ALLOWED = {
    *("A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H1", "H2", "H3", "H4", "H5", "H6", "HR", "LI"),
    *("OL", "P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"),
}


def test_markdown_becomes_elements(page: Any, engine: ScriptedEngine) -> None:
    engine.answer = ARTICLE
    text = ask(page, "write").locator(".text")
    for selector, content in {
        "h1": "Title",
        "em": "short",
        "strong": "text",
        "p > code": "code",
        "ol > li > ul > li": "inner",
        "th": "a",
        "blockquote": "quoted",
        "pre code": 'def f(x):\n    return "<b>" + x  # comment\n',
    }.items():
        assert text.locator(selector).first.text_content().strip("\n") == content.strip("\n"), selector
    link = text.locator("a")
    assert link.get_attribute("href") == "https://example.org/a?b=1&c=2"
    assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer")
    assert "Second line." in text.inner_text().splitlines()
    assert text.locator("pre .hljs-keyword").first.text_content() == "def"
    assert text.locator("pre .hljs-comment").text_content() == "# comment"
    assert text.locator(".code-bar span").text_content() == "python"


@pytest.mark.parametrize("part", ["user", "text"])
def test_hostile_markdown_does_nothing(page: Any, engine: ScriptedEngine, part: str) -> None:
    sent: list[str] = []
    engine.answer = HOSTILE
    page.on("request", lambda request: sent.append(request.url))
    text = ask(page, HOSTILE).locator(f".{part}")
    tags = text.evaluate("root => [...root.querySelectorAll('*')].map(element => element.tagName)")
    assert set(tags) <= ALLOWED
    names = text.evaluate("root => [...root.querySelectorAll('*')].flatMap(element => element.getAttributeNames())")
    assert set(names) <= {"class", "href", "title", "target", "rel", "type", "data-action", "tabindex"}
    hrefs = text.evaluate("root => [...root.querySelectorAll('[href]')].map(element => element.getAttribute('href'))")
    assert hrefs
    assert all(href.startswith("https://example.org/") for href in hrefs)
    for element in text.locator("a, p, code").all():
        element.dispatch_event("mouseover")
    text.locator("a:not([href])").first.click()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("getComputedStyle(document.body).display") == "grid"
    assert not [url for url in sent if "example.org" in url]
    shown = text.inner_text()
    assert "<script>window.hacked = 1</script>" in shown
    assert "<iframe" in shown


def test_message_is_markdown_and_edited_as_it_was_written(page: Any, engine: ScriptedEngine) -> None:
    engine.answer = "fine"
    with page.expect_request("**/v1/chat/completions") as sent:
        user = ask(page, ARTICLE).locator(".user")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": ARTICLE}]
    assert user.locator("h1").text_content() == "Title"
    assert user.locator("pre .hljs-keyword").first.text_content() == "def"
    page.click("[data-action=edit]")
    assert page.input_value(".edit textarea") == ARTICLE


@pytest.mark.full
def test_scripts_are_refused_by_the_policy_too(page: Any) -> None:
    """Without the sanitiser, a sink for markup takes no text, and an inline script does not run."""
    page.wait_for_selector("#health[data-state=ok]")
    refused = "html => { try { document.body.innerHTML = html; return '' } catch (error) { return error.name } }"
    assert page.evaluate(refused, "<b>text</b>") == "TypeError"
    inserted = (
        "() => { const s = document.createElement('script'); s.append('window.hacked = 1'); document.body.append(s) }"
    )
    page.evaluate(f"({inserted})()")
    assert page.evaluate("window.hacked") is None


@pytest.mark.full
def test_code_is_copied_alone(page: Any, engine: ScriptedEngine) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    engine.answer = "Text:\n\n```python\nx = 1\ny = 2\n```\n\nmore"
    turn = ask(page, "hello")
    turn.locator("[data-action=copy-code]").click()
    page.wait_for_selector("[data-done=Copied]")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\ny = 2"
    turn.locator("[data-action=copy]").click()
    page.wait_for_selector("[data-action=copy][data-done=Copied]")
    assert page.evaluate("navigator.clipboard.readText()") == engine.answer


@pytest.mark.full
@pytest.mark.parametrize("answer", [">" * 4000 + " deep", "- " * 3000 + "deep", "[" * 5000, "**_" * 3000, "`" * 4001])
def test_odd_answers_are_shown_all_the_same(page: Any, engine: ScriptedEngine, answer: str) -> None:
    page.fill("#max_tokens", "")
    engine.answer = answer
    assert ask(page, "hello").locator(".text").inner_text().strip()


@pytest.mark.full
def test_settled_blocks_stay_while_the_answer_grows(page: Any) -> None:
    """Selections and scrolled code survive: only the last block is made again."""
    grow = """async () => {
        const { Markdown } = await import("./page/markdown.js");
        const root = document.createElement("div");
        const view = new Markdown(root);
        view.show("first\\n\\n```python\\nx = 1", false);
        const [first, code] = root.children;
        const plain = code.querySelectorAll("span.hljs-number").length;
        view.show("first\\n\\n```python\\nx = 1\\n```\\n\\nlast", false);
        view.show("first\\n\\n```python\\nx = 1\\n```\\n\\nlast [a]\\n\\n[a]: https://example.org/", true);
        const links = root.querySelectorAll("a").length;
        return [first === root.children[0], plain, root.querySelectorAll("span.hljs-number").length, links];
    }"""
    assert page.evaluate(grow) == [False, 0, 1, 1]
    kept = grow.replace("last [a]\\n\\n[a]: https://example.org/", "last")
    assert page.evaluate(kept) == [True, 0, 1, 0]


def test_reasoning_is_folded_and_not_repeated(page: Any, engine: ScriptedEngine) -> None:
    engine.answer = "<think>\nFirst <b>think</b>.\n</think>\n\nThen *answer*."
    turn = ask(page, "hello")
    assert turn.locator(".text").inner_text() == "Then answer."
    assert turn.locator(".thoughts").is_hidden()
    turn.locator("summary").click()
    assert turn.locator(".thoughts").inner_text() == "First <b>think</b>."
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "more")
    assert sent.value.post_data_json["messages"][1]["content"] == "Then *answer*."


@pytest.mark.full
def test_reasoning_in_a_field_of_its_own_is_folded(page: Any) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Let me "}, {"reasoning_content": "see."}]
    deltas += [{"content": "Four"}, {"content": "."}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    turn = ask(page, "2 + 2?")
    assert turn.locator(".text").inner_text() == "Four."
    assert turn.locator(".thoughts").text_content() == "Let me see."
    assert turn.locator(".thoughts").is_hidden()


@pytest.mark.full
def test_mark_of_reasoning_inside_an_answer_is_text(page: Any, engine: ScriptedEngine) -> None:
    engine.answer = "It writes <think> and </think> around it."
    turn = ask(page, "hello")
    assert turn.locator(".text").inner_text() == engine.answer
    assert turn.locator(".reasoning").is_hidden()


@pytest.mark.full
def test_plain_text_is_not_read_as_markdown(page: Any, engine: ScriptedEngine) -> None:
    page.check("input[value=text]", force=True)
    engine.answer = "# no *title*\n\n  two  spaces <think>"
    assert ask(page, "hello").locator(".text").text_content() == engine.answer

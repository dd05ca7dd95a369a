"""Errors of any type in a chat template are refusals, on every path and on the command line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_command import runtime_here

from compress.common.cli import demo_model_path
from runtime.server.serving import Limits
from runtime.text.tokenizer import Tokenizer

FAILING = {
    "AttributeError": "{{ 5|dictsort }}",
    "AssertionError": "{{ 'x'|truncate(1.5) }}",
    "RuntimeError": "{{ cycler() }}",
    "syntax of Jinja": "{% if %}",
    "syntax of Python": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
}
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hello"},
    "/tokenize": {"messages": MESSAGES},
}


def with_template(folder: Path, template: str) -> Path:
    shutil.copytree(demo_model_path(), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
def test_every_path_refuses(
    template: str, tmp_path: Path, serve_alphabet: Callable[..., Any], no_traceback: None
) -> None:
    tokenizer = Tokenizer.open(with_template(tmp_path / "model", template))
    url, _ = serve_alphabet(tokenizer=tokenizer, limits=Limits(100, max_requests=4))
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, body in BODIES.items():
            found = client.post(path, json={"model": "alphabet", **body})
            assert found.status_code == 400, (path, found.text)
            assert found.json()["error"]["code"] == "refused"


def test_the_process_of_long_bodies_refuses(tmp_path: Path, serve_alphabet: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.open(with_template(tmp_path / "model", FAILING["syntax of Jinja"]))
    url, _ = serve_alphabet(tokenizer=tokenizer, limits=Limits(100, max_requests=4))
    body = {"model": "alphabet", "messages": [{"role": "user", "content": "x" * 2**16}]}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "refused")


@pytest.mark.parametrize("arguments", [("chat",), ("generate", "--chat", "--prompt", "Hi")], ids=["chat", "generate"])
@pytest.mark.parametrize("template", [FAILING["AttributeError"], FAILING["syntax of Python"]])
def test_commands_end_with_one_line(arguments: tuple[str, ...], template: str, tmp_path: Path) -> None:
    command, *options = arguments
    folder = with_template(tmp_path / "model", template)
    result = runtime_here(command, str(folder), *options, cwd=tmp_path, stdin="Hello\n")
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if "the model's chat template" in line]) == 1

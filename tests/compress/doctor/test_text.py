"""Damaged tokenizers, templates and ids of special tokens, each with its own finding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import change_config, change_tensors

pytestmark = pytest.mark.full

Find = Callable[..., set[tuple[str, str]]]


def change_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def write_template(folder: Path, text: str) -> Path:
    (folder / "chat_template.jinja").write_text(text)
    return folder


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{% for m in messages %}{{ m.content ", ("error", "fails")),
        ("{{ messages[0].nothing.at_all }}", ("error", "fails")),
        ("{% for i in range(10**9) %}{% endfor %}", ("error", "fails")),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", ("error", "content-lost")),
        (TURNS.replace("im_start", "turn_start"), ("warning", "unknown-markup")),
        (TURNS.replace("<|im_end|>\n", "<|im_start|>"), ("warning", "turn-end")),
        (TURNS.replace("in messages", "in messages if m.role != 'system'"), ("warning", "system-lost")),
    ],
)
def test_templates(dense: Path, kinds: Find, text: str, kind: tuple[str, str]) -> None:
    assert kind in kinds(write_template(dense, text))


def test_templates_that_are_sound(dense: Path, kinds: Find) -> None:
    assert kinds(write_template(dense, TURNS)) == set()
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS
    assert kinds(write_template(dense, refusing)) == set()
    (dense / "chat_template.jinja").unlink()
    assert kinds(dense) == set()


def test_no_tokenizer(dense: Path, kinds: Find) -> None:
    (dense / "tokenizer.json").unlink()
    assert kinds(dense) == {("warning", "no-tokenizer")}


def test_text_that_does_not_come_back(dense: Path, kinds: Find) -> None:
    change_json(dense / "tokenizer.json", lambda content: content.update({"normalizer": {"type": "Lowercase"}}))
    assert ("warning", "round-trip") in kinds(dense)


def test_more_tokens_than_rows(dense: Path, kinds: Find) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:8000]

    change_tensors(change_config(dense, vocab_size=8000), cut)
    assert kinds(dense) == {("error", "vocabulary-size")}


def test_a_special_token_that_is_none(dense: Path, kinds: Find) -> None:
    change_json(dense / "tokenizer_config.json", lambda content: content.update({"pad_token": "<|fill|>"}))
    assert kinds(dense) == {("warning", "special-token")}


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ids_outside_of_the_vocabulary(dense: Path, kinds: Find, file: str) -> None:
    change_json(dense / file, lambda content: content.update({"pad_token_id": 9000}))
    assert kinds(dense) == {("error", "token-id")}


def test_no_end_of_an_answer(dense: Path, kinds: Find) -> None:
    (dense / "generation_config.json").unlink()
    change_config(dense, eos_token_id=None)
    change_json(dense / "tokenizer_config.json", lambda content: content.pop("eos_token"))
    assert kinds(dense) == {("warning", "no-eos")}


def test_ends_that_disagree(dense: Path, kinds: Find) -> None:
    change_json(dense / "generation_config.json", lambda content: content.update({"eos_token_id": [2]}))
    assert kinds(dense) == {("warning", "eos-agreement")}


def test_an_end_that_the_template_writes_is_missing(dense: Path, kinds: Find) -> None:
    change_json(dense / "generation_config.json", lambda content: content.update({"eos_token_id": 0}))
    assert kinds(dense) == {("warning", "turn-end")}

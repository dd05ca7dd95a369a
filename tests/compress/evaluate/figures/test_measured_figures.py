"""Figures of what models do, on the demo models and on copies with one known defect."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from folders import change_tensors, private_copy
from tiny_mtp import save_copying_model

from compress.common.cli import demo_model_path
from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure
from compress.evaluate.figures.json_answers import JsonAnswers, is_json
from compress.evaluate.figures.loops import loop_length
from compress.evaluate.gate import usual_limits
from compress.evaluate.prompts import written_exchanges
from compress.evaluate.side import measure_figures
from compress.pipeline.answers import sides
from runtime.text.tokenizer import Tokenizer

MIXTURE = demo_model_path().with_name("demo_model_mixture")
ANSWERED = {"loops", "json"}


def measured(dense: Path, packed: Path, *names: str) -> dict[str, Finding]:
    return measure_figures(names, *sides(dense, packed), lambda *_: None)


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([7] * 24, 1),
        ([7] * 23, 0),
        ([5, *[1, 2] * 12], 2),
        ([*range(10)] * 3, 10),
        ([*range(10)] * 2, 0),
        ([*[1, 2] * 12, 3], 0),
        ([], 0),
    ],
)
def test_a_loop_repeats_three_times_up_to_the_end(tokens: list[int], period: int) -> None:
    assert loop_length(tokens) == period


@pytest.mark.parametrize(
    ("answer", "is_valid"),
    [
        ('{"a": 1}', True),
        (" [1, 2]\n", True),
        ('```json\n{"a": 1}\n```', True),
        ("```\n[1]\n```", True),
        ('Here: {"a": 1}', False),
        ('{"a": 1', False),
        ("3", False),
        ("", False),
    ],
)
def test_json_is_an_object_or_an_array_alone_or_fenced(answer: str, is_valid: bool) -> None:
    assert is_json(answer) == is_valid
    assert is_json(f"{{thought</think>\n{answer}", "</think>") == is_valid


def test_json_counts_prompts_that_the_dense_model_answers_so() -> None:
    judge = JsonAnswers().judge
    assert judge([True, True, False, True], [True, False, True, True]).value == pytest.approx(2 / 3)
    assert not judge([False, False], [True, True]).applies


def test_a_model_beside_itself_keeps_all_usual_limits() -> None:
    names = [name for name in usual_limits() if name not in ANSWERED]
    found = measured(MIXTURE, MIXTURE, *names)
    assert {name: each.value for name, each in found.items()} == {
        "routers": 0.0,
        "ends": 1.0,
        "template": 1.0,
        "drafts": None,
    }
    assert not found["drafts"].applies
    assert len(found["routers"].details["layers"]) == 6
    assert found["ends"].details["kinds"]["end of sequence"]["places"] >= 8


def test_a_model_that_lost_its_end_token_ends_nowhere(tmp_path: Path) -> None:
    dense = demo_model_path()
    packed = private_copy(dense, tmp_path / "packed")
    change_tensors(packed, lambda tensors: tensors["model.embed_tokens.weight"][:3].zero_())
    found = measured(dense, packed, "ends")["ends"]
    assert found.value == 0
    assert found.details["kinds"]["end of sequence"]["packed"] < 0.01
    assert found.details["kinds"]["end of sequence"]["dense"] > 0.5


def test_reasoning_has_a_place_of_its_own_to_end() -> None:
    plain = Tokenizer.open(demo_model_path())
    thinking = Tokenizer.open(demo_model_path())
    thinking.chat_template = f"{plain.chat_template}{{# <think> </think> #}}"
    texts = [thinking.decode(tokens[start:]) for tokens, start in written_exchanges(thinking)]
    assert all(text.startswith("<think>\n") and "\n</think>\n\n" in text for text in texts)
    assert not any("</think>" in plain.decode(tokens[start:]) for tokens, start in written_exchanges(plain))


def test_another_template_and_another_vocabulary_are_named(tmp_path: Path) -> None:
    packed = private_copy(demo_model_path(), tmp_path / "packed")
    template = packed / "chat_template.jinja"
    template.write_text(template.read_text().replace("message['role']", "message['role'] | replace('system', 'user')"))
    found = measured(demo_model_path(), packed, "template")["template"]
    assert found.details["differing"] == ["system"]
    tokenizer = json.loads((packed / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (packed / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert measured(demo_model_path(), packed, "template")["template"].value == 0


def test_routers_flip_from_the_layer_that_changed(tmp_path: Path) -> None:
    packed = private_copy(MIXTURE, tmp_path / "packed")
    router = "model.layers.3.block_sparse_moe.gate.weight"

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[router] = tensors[router].roll(1, 0)

    change_tensors(packed, swap)
    layers = measured(MIXTURE, packed, "routers")["routers"].details["layers"]
    shares = [layers[f"model.layers.{index}"] for index in range(6)]
    assert shares[:3] == [0, 0, 0]
    assert shares[3] > 0.5
    assert min(shares[4:]) > 0
    assert not measured(demo_model_path(), demo_model_path(), "routers")["routers"].applies


@pytest.mark.full
def test_answers_of_the_demo_model_loop_and_are_no_json() -> None:
    found = measured(demo_model_path(), demo_model_path(), "loops", "json")
    assert found["loops"].value == 0
    assert found["loops"].details["dense"] == found["loops"].details["packed"] > 8
    assert not found["json"].applies


@pytest.mark.full
def test_drafts_are_counted_relative_to_the_dense_head(tmp_path: Path) -> None:
    dense = save_copying_model(tmp_path / "dense", vocab_size=8192)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_path() / name, dense / name)
    worse = private_copy(dense, tmp_path / "worse")
    change_tensors(worse, lambda tensors: tensors["model.layers.1.eh_proj.weight"].zero_())
    assert measured(dense, dense, "drafts")["drafts"].value == 1
    found = measured(dense, worse, "drafts")["drafts"]
    assert found.details["dense"] > 0.8
    assert found.value < 0.5


def test_a_figure_that_cannot_be_measured_says_why(tmp_path: Path) -> None:
    packed = private_copy(demo_model_path(), tmp_path / "packed")
    for file in packed.glob("tokenizer*"):
        file.unlink()
    found = measured(demo_model_path(), packed, "template", "routers")
    assert found["template"].value is None
    assert found["template"].applies
    assert "tokenizer.json" in found["template"].text
    assert not found["routers"].applies


def test_a_figure_is_added_by_one_class() -> None:
    class Size(MeasuredFigure):
        help, word = "bytes of the tokenizer", "at most"

        def observe(self, side) -> int:
            return (side.folder / "tokenizer.json").stat().st_size

        def judge(self, dense: int, packed: int) -> Finding:
            return Finding(packed / dense, f"{dense} -> {packed}")

    FIGURES.register("size")(Size())
    try:
        assert measured(demo_model_path(), MIXTURE, "size")["size"].value == pytest.approx(1, abs=0.01)
    finally:
        FIGURES.remove("size")

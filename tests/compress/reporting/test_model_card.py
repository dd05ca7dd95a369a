"""The model card of a checkpoint: what the hub reads of it, what stands in it, and the card of the source below."""

import json
from pathlib import Path

import pytest
import yaml
from folders import change_config
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.cli import make_app
from compress.common.errors import CheckpointError
from compress.common.files import REPORT_FILE
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import Recipe
from compress.reporting.model_card import CARD_FILE, MARK, write_card
from compress.stages.quantize import QuantizeStage

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE_CARD = """---
license: other
license_name: tongyi
license_link: LICENSE
language: [en, de]
pipeline_tag: text-generation
tags: [chat, "gptq"]
model-index:
- name: x
  results: []
---

# The source

It counts | sheep.
"""


def card_of(folder: Path) -> ModelCard:
    """A card, read by the hub's own library."""
    return ModelCard((folder / CARD_FILE).read_text())


def pack(source: Path, out: Path, name: str = "", *stages: QuantizeStage) -> ModelCard:
    """Rounds a model whose recorded name is `name`, and returns the card of the result."""
    recipe = Recipe(stages or (QuantizeStage("rtn", Int(4, 64)),), name="int4-rtn")
    request = RunRequest(source, name or str(source), recipe, out, measure=False, command="compress quantize X")
    run(prepare(request), quiet=True)
    return card_of(out)


@pytest.fixture
def source(tiny_model, tmp_path: Path) -> Path:
    """A tiny model with a card."""
    folder = tmp_path / "source"
    folder.mkdir()
    for file in tiny_model().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / CARD_FILE).write_text(SOURCE_CARD)
    return folder


def test_the_header_names_source_and_licence(source: Path, tmp_path: Path) -> None:
    fields = pack(source, tmp_path / "packed", f"org/name@{COMMIT}").data.to_dict()
    assert fields["base_model"] == "org/name"
    assert fields["base_model_relation"] == "quantized"
    assert (fields["license"], fields["license_name"], fields["license_link"]) == ("other", "tongyi", "LICENSE")
    assert fields["language"] == ["en", "de"]
    assert fields["library_name"] == "transformers"
    assert fields["tags"] == ["chat", "compressed-tensors", "compress-runtime"]  # not that of another format
    assert "model-index" not in fields


def test_the_text_has_figures_recipe_and_engines_and_the_card_of_the_source_below(source: Path, tmp_path: Path) -> None:
    text = pack(source, tmp_path / "packed").text
    report = json.loads((tmp_path / "packed" / REPORT_FILE).read_text())
    assert f"{report['structure']['bits_per_weight']:.3f} in the quantized layers" in text
    assert f"{report['structure']['bits_per_parameter']:.3f} over the whole model" in text
    assert "not measured: not requested" in text
    assert "vLLM" in text
    assert "vllm serve ." in text
    assert "compress quantize X" in text
    own, _, below = text.partition(MARK)
    assert "It counts | sheep." in below
    assert "sheep" not in own
    recipe = yaml.safe_load(own.partition("```yaml\n")[2].partition("```")[0])
    assert recipe["stages"][0]["scheme"] == {"bits": 4, "group_size": 64, "symmetric": True}


def test_a_source_of_no_known_name_is_left_out(source: Path, tmp_path: Path) -> None:
    assert "base_model" not in pack(source, tmp_path / "packed").data.to_dict()
    change_config(source, _name_or_path="org/trained")
    assert pack(source, tmp_path / "again").data.to_dict()["base_model"] == "org/trained"


def test_cards_do_not_nest(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", f"org/name@{COMMIT}")
    again = pack(tmp_path / "packed", tmp_path / "again", "", QuantizeStage("rtn", Int(3, 64)))
    assert again.data.to_dict()["base_model"] == "org/name"
    assert again.text.count(MARK) == 1
    assert again.text.count("# The source") == 1
    assert "w4a16" not in again.text.partition(MARK)[2]


def test_an_export_has_a_card_of_its_own_format(source: Path, tmp_path: Path) -> None:
    first = pack(source, tmp_path / "packed", f"org/name@{COMMIT}")
    for format in ("gptq", "dense"):
        out = export_checkpoint(tmp_path / "packed", format, tmp_path / format)
        write_card(out, tmp_path / "packed")
        card = card_of(out)
        assert (format in card.data.tags) == (format == "gptq")
        assert "compressed-tensors" not in card.data.tags
        assert card.data.to_dict()["base_model"] == "org/name"
        assert card.text.partition(MARK)[2] == first.text.partition(MARK)[2]


def test_what_only_this_runtime_loads_says_so(source: Path, tmp_path: Path) -> None:
    stages = (QuantizeStage("rtn", Int(4, 64)), QuantizeStage("rtn", Int(8, 64), targets=("embed_tokens",)))
    card = pack(source, tmp_path / "packed", "", *stages)
    assert card.data.library_name == "compress-runtime"
    assert "vllm serve" not in card.text


@pytest.mark.parametrize(
    "text", ["", "no header", "---\n[unclosed\n---\nbody", "---\nlist\n---\nbody", "\ufeff---\na: 1\n---\n"]
)
def test_any_card_of_a_source_gives_a_valid_one(text: str, source: Path, tmp_path: Path) -> None:
    (source / CARD_FILE).write_text(text)
    card = pack(source, tmp_path / "packed")
    assert card.data.tags == ["compressed-tensors", "compress-runtime"]
    for word in ("no header", "[unclosed", "body"):
        assert (word in card.text) == (word in text)


def test_a_source_without_a_card(source: Path, tmp_path: Path) -> None:
    (source / CARD_FILE).unlink()
    assert MARK not in pack(source, tmp_path / "packed").text


def test_an_export_with_a_damaged_report_is_refused_before_it_is_written(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed")
    (tmp_path / "packed" / REPORT_FILE).write_text('{"format_version": 1}')
    asked = ["export", str(tmp_path / "packed"), "--format", "dense", "--out", str(tmp_path / "d")]
    found = CliRunner().invoke(make_app(), asked)
    assert isinstance(found.exception, CheckpointError), found.output
    assert not (tmp_path / "d").exists()

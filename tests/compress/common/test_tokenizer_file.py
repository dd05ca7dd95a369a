"""Tokenizers that would end the process, or take all memory, are refused; what the library fails on is an error."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from calibration.sequences import encode_documents, load_tokenizer
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, ToolkitError
from runtime.text.tokenizer import Tokenizer


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLED = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}
EXPLOSIVE: dict[str, dict[str, Any]] = {
    "many replacements": {"normalizer": {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "aa")] * 40}},
    "a long one": {"normalizer": replaced({"Regex": "[a-z]"}, "a" * 5000)},
    "nested": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [replaced({"String": "a"}, "a" * 100)] * 2}] * 3,
        }
    },
    "of decoders": {"decoder": {"type": "Sequence", "decoders": [replaced({"String": "e"}, "ee")] * 40}},
    "templates": {
        "post_processor": {"type": "Sequence", "processors": [{**DOUBLED, "pair": [], "special_tokens": {}}] * 30}
    },
    "many steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 200}},
    "trie of 4 GiB": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAA=="}},
    "no trie": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAA=="}},
    "empty pattern": {"normalizer": replaced({"String": ""}, "x")},
}
FAILING: dict[str, dict[str, Any]] = {
    "backtracking": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$|(a|a)*b"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "damaged trie": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAA"}},
    "chunks of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}


def model_with(changes: dict[str, Any], folder: Path) -> Path:
    model = shutil.copytree(demo_model_path(), folder / "model")
    content = json.loads((model / "tokenizer.json").read_bytes())
    (model / "tokenizer.json").write_text(json.dumps(content | changes))
    return model


@pytest.mark.parametrize("case", EXPLOSIVE)
def test_tokenizers_without_bounds_are_refused_before_they_are_loaded(case: str, tmp_path: Path) -> None:
    model = model_with(EXPLOSIVE[case], tmp_path)
    for load in (Tokenizer.open, load_tokenizer):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load(model)


@pytest.mark.parametrize("case", FAILING)
def test_panics_of_the_library_are_errors(case: str, tmp_path: Path) -> None:
    model, text = model_with(FAILING[case], tmp_path), "a" * 40 + "c"
    with pytest.raises(ToolkitError, match="tokenizer"):
        Tokenizer.open(model).encode(text)
    with pytest.raises(ToolkitError, match="tokenizer"):
        encode_documents([text], load_tokenizer(model))
